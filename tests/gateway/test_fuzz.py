"""Mutated bodies never break the gateway: a 4xx in OpenAI's envelope or a right answer. See tests/faults/fuzz."""

import asyncio
import os

import pytest
from click.testing import CliRunner

from tests.faults.fuzz import FAMILIES, Target, fuzz, some
from tests.faults.fuzz.__main__ import main
from tests.faults.fuzz.watch import HealthWatch, memory_of
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
    assert findings.violations == []
    assert sum(findings.statuses.values()) == COUNT
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_requests(family):
    first, again, other = (list(some(family, TARGET, 50, seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_gateway_that_does_not_answer_is_told() -> None:
    with HealthWatch("http://127.0.0.1:1") as watch:
        assert watch.asked.wait(90)
    assert "ConnectError" in next(iter(watch.problems))


async def test_memory_is_that_of_the_gateway(stack) -> None:
    url = str(stack.client.base_url).rstrip("/")
    own = memory_of(url, os.getpid())
    assert own is not None
    grown = bytearray(b"x") * 2**27
    after = memory_of(url, os.getpid())
    assert after is not None
    assert after - own > 100
    del grown
    told = await asyncio.to_thread(memory_of, url, None)
    assert told is not None
    assert 0.5 < told / own < 2


@pytest.mark.parametrize(("more", "sent"), [([], 20), (["--seconds", "0"], 0)])
async def test_the_command_tells_what_it_sent(stack, more, sent) -> None:
    url = str(stack.client.base_url).rstrip("/")
    wanted = [url, "--model", "tiny", "--family", "headers", "--hostile", "20", "--max-lag", "90", *more]
    result = await asyncio.to_thread(CliRunner().invoke, main, wanted)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{sent} headers: ")
