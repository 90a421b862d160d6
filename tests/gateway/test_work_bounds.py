"""Work that a request asks for: bounded before it begins, and not on the event loop."""

import asyncio
import base64
import json
import threading
import time

import numpy as np
import pytest

from llmops import contract
from llmops.gateway.api import embeddings as embeddings_endpoint
from llmops.gateway.api import tokenize as tokenize_endpoint
from llmops.gateway.api.anthropic.chat_conversion import to_chat_messages
from llmops.gateway.api.anthropic.schemas import MessageParam
from llmops.gateway.api.embeddings import EmbeddingRequest
from llmops.gateway.generation import sampling
from llmops.gateway.generation.parsers.tool_messages import tools_in_system_message
from llmops.gateway.interfaces import Usage
from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.gateway_stack import BODIES, CHAT, COMPLETIONS, RESPONSES, running

WORDS = "The capital of France is Paris. "


@pytest.fixture
async def roomy(card, tokenizer):
    """A model with room for long texts."""
    async with running({**card, "max_seq_len": 100_000}, tokenizer) as stack:
        stack.say("Hello")
        yield stack


@pytest.fixture
def encodings(monkeypatch):
    """The length of each text that is tokenised, and the thread in which it is."""
    found: list[tuple[int, str]] = []
    encode = TextTokenizer.encode

    def recorded(self, text, **how):
        found.append((len(text), threading.current_thread().name))
        return encode(self, text, **how)

    monkeypatch.setattr(TextTokenizer, "encode", recorded)
    return found


# -- stop_token_ids --------------------------------------------------------------------------------------------------


async def test_stop_token_ids_are_few_and_the_model_s(stack, card):
    stack.say("Hello")
    for path in (CHAT, COMPLETIONS, RESPONSES):
        for ids, said in (([5] * 1025, "At most 1024 stop_token_ids"), ([card["vocab_size"]], "token ids from 0 to")):
            answer = await stack.client.post(path, json={**BODIES[path], "stop_token_ids": ids})
            error = answer.json()["error"]
            found = (answer.status_code, error["type"], error["param"], said in error["message"])
            assert found == (400, "invalid_request_error", "stop_token_ids", True)
        at_most = {**BODIES[path], "stop_token_ids": [5] * 1023 + [card["vocab_size"] - 1]}
        assert (await stack.client.post(path, json=at_most)).status_code == 200


# -- linear in the size of the request -------------------------------------------------------------------------------


def test_many_blocks_of_thinking_are_joined_once():
    """Before the fix, 7,400 blocks of 2 KB held the gateway for 23 s, as the text was copied for each block."""
    thinking = {"type": "thinking", "thinking": "\N{GRINNING FACE}" * 1000}
    said = [MessageParam(role="assistant", content=[thinking] * 4000), MessageParam(role="user", content="Hi")]
    began = time.process_time()
    messages, _ = to_chat_messages(said, None)
    assert time.process_time() - began < 2
    assert len(messages[0]["reasoning_content"]) == 4_000_000


def test_many_results_of_tools_are_joined_once():
    """Before the fix, 4,000 results of 4 KB for a template without tools took 75 s."""
    results = [{"role": "tool", "tool_call_id": "c", "content": "\N{GRINNING FACE}" * 1000}] * 4000
    began = time.process_time()
    (message,) = tools_in_system_message(results, [])
    assert time.process_time() - began < 2
    assert message["content"].count("<tool_response>") == 4000


async def test_bad_words_of_many_prompts_are_tokenised_once_and_not_on_the_loop(card, tokenizer, encodings):
    """Before the fix, 16 words of 1,024 characters beside 64 prompts held the gateway for 2 s."""
    card["capabilities"]["bad_words"] = True
    async with running(card, tokenizer) as stack:
        stack.say("Hello")
        words = [f"{at}{'x' * 1000}" for at in range(16)]
        body = {"model": "tiny", "prompt": ["a"] * 64, "max_tokens": 1, "bad_words": words}
        assert (await stack.client.post(COMPLETIONS, json=body)).status_code == 200
    assert [thread.split("_")[0] for size, thread in encodings if size > 1000] == ["llmops-text"] * 32


async def test_logit_bias_of_many_prompts_is_read_once(card, tokenizer, monkeypatch):
    """Before the fix, 22,000 biases beside 64 prompts held the gateway for 0.3 s, and took 120 MB."""
    read, logit_bias = [], sampling._logit_bias
    monkeypatch.setattr(sampling, "_logit_bias", lambda *given: read.append(given) or logit_bias(*given))
    card["capabilities"]["logit_bias"] = True
    async with running(card, tokenizer) as stack:
        stack.say("Hello")
        body = {"model": "tiny", "prompt": ["a"] * 8, "max_tokens": 1, "logit_bias": {"5": 1}}
        assert (await stack.client.post(COMPLETIONS, json=body)).status_code == 200
        seeds = {str(one[contract.SEED.name]) for one in stack.triton.requests}
    assert (len(read), len(seeds)) == (1, 8)


# -- off the loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/input_tokens"])
async def test_a_short_message_after_a_long_history_is_not_tokenised_on_the_loop(roomy, encodings, path):
    first = await roomy.client.post(RESPONSES, json={"model": "tiny", "input": WORDS * 200})
    encodings.clear()
    body = {"model": "tiny", "input": "And Spain?", "previous_response_id": first.json()["id"]}
    assert (await roomy.client.post(path, json=body)).status_code == 200
    assert [(size > 6000, thread.split("_")[0]) for size, thread in encodings] == [(True, "llmops-text")]


async def test_a_history_of_long_arguments_is_not_cut_on_the_loop(card, tokenizer, tmp_path, encodings):
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        question = {"type": "message", "role": "user", "content": "?"}
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps(WORDS * 200)}
        made = await stack.client.post("/v1/conversations", json={"items": [question, call]})
        encodings.clear()
        body = {**BODIES[CHAT], "conversation_id": made.json()["id"], "stream": False}
        await stack.client.post("/api/chat/completions", json=body)
    assert {thread.split("_")[0] for size, thread in encodings if size > 500} == {"llmops-text"}


async def test_token_ids_are_not_decoded_for_filters_on_the_loop(card, tokenizer, monkeypatch):
    pytest.importorskip("re2")
    threads, decode = [], TextTokenizer.decode

    def noted(self, ids, **how):
        threads.append((len(ids), threading.current_thread().name.partition("_")[0]))
        return decode(self, ids, **how)

    monkeypatch.setattr(TextTokenizer, "decode", noted)
    safety = {"filters": {"words": {"kind": "rules", "words": ["forbidden"]}}, "policy": {"prompt": ["words"]}}
    async with running({**card, "max_seq_len": 100_000}, tokenizer, safety=safety) as stack:
        stack.say("Hello")
        body = {"model": "tiny", "prompt": tokenizer.encode(WORDS) * 500, "max_tokens": 1}
        assert (await stack.client.post(COMPLETIONS, json=body)).status_code == 200
    assert [thread for size, thread in threads if size > 500] == ["llmops-text"]


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_many_vectors_are_written_in_pieces_between_which_others_have_their_turn(form):
    vectors = np.arange(40 * 1024, dtype=np.float32).reshape(40, 1024) / 4
    body = EmbeddingRequest(model='a"b', input="x", encoding_format=form)
    turns = []

    async def another() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    beside = asyncio.create_task(another())
    pieces = [piece async for piece in embeddings_endpoint._encode(body, vectors, Usage(7))]
    beside.cancel()
    written = json.loads(b"".join(pieces))
    assert len(turns) >= 40 * 1024 // embeddings_endpoint.FLOATS_PER_TURN
    data = written.pop("data")
    assert written == {"object": "list", "model": 'a"b', "usage": {"prompt_tokens": 7, "total_tokens": 7}}
    assert [(one["object"], one["index"]) for one in data] == [("embedding", at) for at in range(40)]
    decode = (lambda one: np.frombuffer(base64.b64decode(one), "<f4")) if form == "base64" else list
    assert np.array_equal([decode(one["embedding"]) for one in data], vectors)


# -- what cannot fit -------------------------------------------------------------------------------------------------


async def test_messages_are_tokenised_once(roomy, encodings):
    body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS * 200}], "add_special_tokens": True}
    told = (await roomy.client.post("/tokenize", json=body)).json()
    assert len([size for size, _ in encodings if size > 6000]) == 1
    assert told["tokens"] == roomy.tokenizer.encode(f"<user>{WORDS * 200}\n<assistant>")


@pytest.mark.parametrize("text", [WORDS * 3000, "x" * 90_000, "\n" * 90_000, "你好🙂" * 20_000, "short", ""])
def test_the_beginning_of_a_text_has_the_first_tokens_of_all_of_it(tokenizer, encodings, text):
    whole = tokenizer.encode(text)
    encodings.clear()
    for wanted in (1, 16, 256):
        assert tokenizer.encode_beginning(text, wanted)[:wanted] == whole[:wanted]
    assert len(text) < 10_000 or max(size for size, _ in encodings) < len(text) // 2


async def test_many_tokens_are_written_in_pieces_between_which_others_have_their_turn(roomy, monkeypatch):
    encode, lengths = tokenize_endpoint.json_bytes, []

    def recorded(body):
        parts = body.values() if isinstance(body, dict) else [body]
        lengths.extend(len(part) for part in parts if isinstance(part, list))
        return encode(body)

    monkeypatch.setattr(tokenize_endpoint, "json_bytes", recorded)
    body = {"model": "tiny", "prompt": "7" * 20_000, "return_token_strs": True}
    found = (await roomy.client.post("/tokenize", json=body)).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == 20_000
    assert max(lengths) <= tokenize_endpoint.TOKENS_PER_TURN
