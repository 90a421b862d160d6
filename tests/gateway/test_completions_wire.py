"""POST /v1/completions on the wire: grammars, forms of the prompt."""

import pytest

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.sampling import check_prompt_logprobs
from llmops.gateway.interfaces import Capabilities, ModelMetadata
from tests.support.gateway_stack import running

PATH = "/v1/completions"


@pytest.fixture
async def able(card, tokenizer):
    """A model that can do all that a target may announce."""
    can = {"logprobs": True, "n": 4, "seed": True, "guided": ["regex"], "bad_words": True, "logit_bias": True}
    async with running({**card, "capabilities": can}, tokenizer) as stack:
        yield stack


async def complete(stack, **fields):
    return await stack.client.post(PATH, json={"model": "tiny", "prompt": "Hello", "max_tokens": 20, **fields})


async def test_grammar_and_bad_words_reach_the_engine(able):
    able.say("ab")
    await complete(able, guided_regex="[ab]+", bad_words=["Paris"])
    sent = able.triton.requests[-1]
    assert (sent["guided_decoding_guide_type"], sent["guided_decoding_guide"]) == ("regex", "[ab]+")
    flat = [*able.tokenizer.encode("Paris"), *able.tokenizer.encode(" Paris")]
    assert sent["bad_words_list"][: len(flat)] == flat
    await able.chat(bad_words=["Paris"])
    assert able.triton.requests[-1]["bad_words_list"] == sent["bad_words_list"]


async def test_refused_with_its_param(stack):
    prompts = [("prompt", wrong) for wrong in ([[]], [], [10**6], ["x"] * 65)]
    others = {"echo": True, "suffix": "end", "best_of": 2, "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 0}
    for param, value in [*prompts, *others.items()]:
        answer = await complete(stack, **{param: value})
        assert (answer.status_code, answer.json()["error"]["param"], stack.triton.requests) == (400, param, [])


def test_prompt_logprobs_of_a_long_prompt_are_refused():
    """TensorRT-LLM 1.2.1 `_torch/pyexecutor/llm_request.py`, `LogitsStorage`: prompt x vocabulary, on the GPU."""
    card = ModelMetadata(
        name="m", target="pytorch", tokenizer_dir="", max_batch_size=8, max_seq_len=9000, vocab_size=128_256,
        bos_id=None, end_ids=(2,), pad_id=None, chat_template=False, capabilities=Capabilities(),
    )  # fmt: skip
    check_prompt_logprobs(1, 2092, card)
    with pytest.raises(InvalidRequestError, match="at most 2092 prompt tokens"):
        check_prompt_logprobs(1, 2093, card)


async def test_the_400_for_prompt_logprobs_names_the_target_that_has_them(stack):
    answer = await stack.chat(prompt_logprobs=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "target pytorch without speculation takes it" in answer.json()["error"]["message"]
    stack.say("Hello")
    assert (await stack.chat(prompt_logprobs=None)).status_code == 200
