"""Tests of the length of an answer when the request does not limit it.

The limits are the gateway's `sampling.max_tokens`, and `llmops chat`'s own.
"""

import asyncio

import pytest

from tests.support import forked_cli
from tests.support.gateway_stack import running


async def chat(stack, *arguments: str) -> tuple[str, str]:
    """Return the standard output and standard error of `llmops chat --once`."""
    done = await asyncio.to_thread(forked_cli.run, "chat", "--url", stack.url, "--once", "Hello", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(("setting", "texts"), [(None, 16), (50, 16), (9, 9)])
async def test_the_gateways_setting(card, tokenizer, setting, texts) -> None:
    async with running(card, tokenizer, sampling={"max_tokens": setting}) as stack:
        stack.say("Paris")
        await stack.chat()
        await stack.chat(max_tokens=70)
        await stack.client.post("/v1/completions", json={"model": "tiny", "prompt": "Hello"})
        asked = [sent["request_output_len"][0] for sent in stack.triton.requests]
    assert asked[1:] == [70, texts]
    assert asked[0] == setting if setting else asked[0] > 220


async def test_chat_has_a_limit_and_says_when_it_cuts(card, tokenizer) -> None:
    async with running({**card, "max_seq_len": 4096}, tokenizer) as stack:
        stack.say("Paris")
        out, err = await chat(stack)
        assert (out, err, stack.triton.requests[-1]["request_output_len"]) == ("Paris\n", "", [1024])
        stack.say("Hello world! How are you?" * 9, end=False)
        out, err = await chat(stack, "--max-tokens", "7")
        assert stack.triton.requests[-1]["request_output_len"] == [7]
        assert ("[cut: the answer reached 7 tokens" in err, "--max-tokens" in err) == (True, True)


async def test_chat_with_a_model_of_a_short_context(card, tokenizer) -> None:
    """The context is the limit if the default limit does not fit."""
    async with running(card, tokenizer) as stack:
        stack.say("Paris")
        assert (await chat(stack))[0] == "Paris\n"
        assert 220 < stack.triton.requests[-1]["request_output_len"][0] < 256
