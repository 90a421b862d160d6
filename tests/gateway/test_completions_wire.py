"""POST /v1/completions on the wire: echo, best_of, grammars, forms of the prompt."""

import json

import pytest

from tests.support.gateway_stack import running
from tests.support.scripted_triton import Step

PATH = "/v1/completions"


@pytest.fixture
async def able(card, tokenizer):
    """A model that can do all that a target may announce."""
    can = {"logprobs": True, "n": 4, "seed": True, "guided": ["regex"], "bad_words": True, "logit_bias": True}
    async with running({**card, "capabilities": can}, tokenizer) as stack:
        yield stack


async def complete(stack, **fields):
    return await stack.client.post(PATH, json={"model": "tiny", "prompt": "Hello", "max_tokens": 20, **fields})


async def texts(stack, **fields):
    answer = await complete(stack, **fields)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


async def test_echo_puts_each_prompt_before_its_texts(stack):
    stack.say(" world!")
    assert await texts(stack, echo=True) == ["Hello world!"]
    ids = stack.tokenizer.encode("你好 🙂")
    part = stack.tokenizer.decode(ids[:1])
    assert await texts(stack, echo=True, prompt=[ids, ids[:1]]) == ["你好 🙂 world!", f"{part} world!"]


async def test_echo_in_a_stream_comes_once_and_first(stack):
    stack.say(" world!")
    body = {"model": "tiny", "prompt": "Hello", "stream": True, "echo": True}
    async with stack.client.stream("POST", PATH, json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    chunks = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(chunks) == "Hello world!"
    assert chunks[0].startswith("Hello")
    assert lines[-1] == "[DONE]"


async def test_best_of_gives_the_most_likely_first(able):
    words, chances = ["Hello", "world", "France"], [-2.0, -0.5, -1.0]
    ids = [able.tokenizer.encode(word) for word in words]
    steps = [Step((i,), at, (chance,)) for at, chance in enumerate(chances) for i in ids[at]]
    able.steps(*steps, Step((0,), 0), Step((0,), 1), Step((0,), 2), Step(final=True))
    answer = (await complete(able, n=2, best_of=3)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "world"), (1, "France")]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sum(map(len, ids)), "what was generated was paid for"
    assert able.triton.requests[-1]["num_return_sequences"] == [3]


async def test_grammar_and_bad_words_reach_the_engine(able):
    able.say("ab")
    await complete(able, guided_regex="[ab]+", bad_words=["Paris"])
    sent = able.triton.requests[-1]
    assert (sent["guided_decoding_guide_type"], sent["guided_decoding_guide"]) == ("regex", "[ab]+")
    forms = [able.tokenizer.encode("Paris"), able.tokenizer.encode(" Paris")]
    flat = [token for form in forms for token in form]
    assert sent["bad_words_list"][: len(flat)] == flat
    await able.chat(bad_words=["Paris"])
    assert able.triton.requests[-1]["bad_words_list"] == sent["bad_words_list"]


async def test_refused_with_its_param(stack):
    for fields, param in [
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 9}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [10**6], "echo": True}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ]:
        answer = await complete(stack, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert stack.triton.requests == []


async def test_the_400_for_prompt_logprobs_names_the_target_that_has_them(stack):
    answer = await stack.chat(prompt_logprobs=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert "target pytorch without speculation takes it" in answer.json()["error"]["message"]
    stack.say("Hello")
    assert (await stack.chat(prompt_logprobs=None)).status_code == 200


async def test_best_of_needs_log_probabilities(card, tokenizer):
    async with running({**card, "capabilities": {"n": 4}}, tokenizer) as stack:
        answer = await complete(stack, best_of=2)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
