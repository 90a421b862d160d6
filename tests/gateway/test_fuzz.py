"""Mutated bodies never break the gateway: a 4xx in OpenAI's envelope or a right answer. See tests/faults/fuzz."""

import os

import pytest

from tests.faults.fuzz import Target, fuzz, some
from tests.support.gateway_stack import running

COUNT = int(os.environ.get("LLMOPS_FUZZ_COUNT", "600"))
SEED = int(os.environ.get("LLMOPS_FUZZ_SEED", "7"))
EVERYTHING = {"logprobs": True, "logit_bias": True, "n": 8, "seed": True, "min_p": True, "bad_words": True}
GUIDED = ["json", "json_schema", "regex", "ebnf_grammar"]
TARGET = Target("tiny")


@pytest.fixture
async def able_stack(card, tokenizer):
    """A model that refuses as little as possible, so that bodies get far."""
    able = {**card, "max_seq_len": 32_768, "capabilities": {**EVERYTHING, "guided": GUIDED}}
    async with running(able, tokenizer) as one:
        yield one


@pytest.mark.timeout(1800)
async def test_mutated_bodies(able_stack):
    able_stack.say("The capital of France is Paris.")
    findings = await fuzz(able_stack.client, some("bodies", TARGET, COUNT, SEED))
    print(dict(findings.statuses))
    assert (findings.violations, sum(findings.statuses.values())) == ([], COUNT)
    assert findings.statuses[200] > COUNT / 10
    await able_stack.idle()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "share"), [("headers", 5), ("sizes", 10)])
async def test_hostile_headers_and_sizes(able_stack, family, share):
    able_stack.say("Paris")
    findings = await fuzz(able_stack.client, some(family, TARGET, COUNT // share, SEED), parallel=4)
    print(dict(findings.statuses))
    assert findings.violations == []
    assert findings.statuses[200] > 0
    assert findings.statuses[400] > COUNT / share / 10
    await able_stack.idle()
