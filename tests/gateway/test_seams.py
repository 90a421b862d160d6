"""Answers that lose their replica midway, over HTTP: but for a header or a comment they are as if they had not."""

import contextlib
import json

import pytest

from tests.support.gateway_stack import BODIES, COMPLETIONS, END, RESPONSES, become, card_of, in_front_of
from tests.support.scripted_triton import ScriptedTriton, Step

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = "The capital of France is Paris. <answer>42</answer> How are you? 你好 🙂"
CALL = 'Well.\n<tool_call>\n{"name": "now", "arguments": {"zone": "Paris 🙂"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


class Engine:
    """Says `text` after whatever prompt; a new answer breaks off after `cut` tokens, one that went on does not."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.text, self.cut = tokenizer, TEXT, None
        self.asked: list[dict] = []

    def __call__(self, tensors: dict) -> list[Step]:
        self.asked.append(tensors)
        ids = [*self.tokenizer.encode(self.text), END]
        known = max(at for at in range(len(ids)) if at == 0 or tensors["input_ids"][-at:] == ids[:at])
        steps = [Step((one,), logprobs=(-one / 100,)) for one in ids[known:]][: tensors["request_output_len"][0]]
        if self.cut is not None and not known:
            return [*steps[: self.cut], Step(drop=True)]
        return [*steps, Step(final=True)]


@contextlib.asynccontextmanager
async def two(card, engine):
    async with in_front_of(ScriptedTriton(card, engine), ScriptedTriton(card, engine)) as (client, _):
        await become(client, "ready", "ready")
        yield client


@pytest.fixture
def card(tokenizer_dir, tokenizer):
    return {**card_of(tokenizer_dir, tokenizer), "max_seq_len": 4096, "batch_invariant": True}


def told(text: str, volatile=("id", "created", "created_at", "completed_at", "item_id", "call_id")):
    """An answer's JSON, or that of its events, without what is new each time."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in volatile}
        return [plain(one) for one in value] if isinstance(value, list) else value

    if text.startswith("{"):
        return plain(json.loads(text))
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [plain(json.loads(line)) if line != "[DONE]" else line for line in lines]


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS = {
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, **STREAMED, "temperature": 0}),
    "log-probabilities": ("/v1/chat/completions", {**CHAT, **STREAMED, "temperature": 0, "logprobs": True}),
    "tools": ("/v1/chat/completions", {**CHAT, **STREAMED, "temperature": 0, "tools": TOOLS}),
    "tools, whole": ("/v1/chat/completions", {**CHAT, "temperature": 0, "tools": TOOLS}),
    "stop string": ("/v1/chat/completions", {**CHAT, **STREAMED, "temperature": 0, "stop": "42</answer> How"}),
    "length": ("/v1/completions", {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 21}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "Hello", "temperature": 0, "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "temperature": 0, "max_tokens": 500, "stream": True}),
}


async def test_nothing_else_of_an_answer_differs(card, tokenizer) -> None:
    engine = Engine(tokenizer)
    async with two(card, engine) as client:
        for name, (path, body) in REQUESTS.items():
            engine.text, engine.cut = CALL if "tools" in name else TEXT, None
            whole = await client.post(path, json=body)
            assert whole.status_code == 200, whole.text
            assert ("x-llmops-continued" in whole.headers, ": continued" in whole.text) == (False, False)
            # at the beginning, in the middle, within the stop string or the call
            for cut in (1, 9, 40 if "tools" in name else 13):
                engine.cut = cut
                moved = await client.post(path, json=body)
                assert told(moved.text) == told(whole.text), (name, cut)
                said = [moved.headers.get("x-llmops-continued"), ": continued exact\n" in moved.text]
                assert said == ([None, True] if body.get("stream") else ["exact", False]), (name, cut)
        assert f'llmops_failovers_total{{reason="lost"}} {3 * len(REQUESTS)}' in (await client.get("/metrics")).text


@pytest.mark.parametrize(("exact", "temperature"), [(False, 0), (True, 0.5)])
async def test_where_the_text_may_be_another_it_says_so(card, tokenizer, exact, temperature) -> None:
    engine = Engine(tokenizer)
    engine.cut = 5
    async with two({**card, "batch_invariant": exact}, engine) as client:
        whole = await client.post("/v1/chat/completions", json={**CHAT, "temperature": temperature})
        assert whole.headers["x-llmops-continued"] == "approximate"
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "temperature": temperature, "stream": True})
        assert ": continued approximate\n\n" in streamed.text


async def test_a_grammar_is_made_again_and_compared(card, tokenizer) -> None:
    engine = Engine(tokenizer)
    engine.text = '{"city": "Paris"}'

    def again(tensors: dict) -> list[Step]:
        """Cut once only: a grammar's second try begins from the prompt as well."""
        engine.cut = 5 if not engine.asked else None
        return engine(tensors)

    body = {**CHAT, "temperature": 0, "stream": True, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}
    async with two(card, again) as client:
        moved = await client.post("/v1/chat/completions", json=body)
    chunks = [one for one in told(moved.text) if one != "[DONE]"]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks) == engine.text
    assert ": continued exact\n" in moved.text
    first, second = engine.asked
    assert first["input_ids"] == second["input_ids"]


async def test_an_answer_that_nobody_has_seen_begins_anew_and_is_billed_once(card, tokenizer) -> None:
    """Drawn without a seed, so that a grammar's state cannot be made again."""
    engine = Engine(tokenizer)
    form = {"type": "json_schema", "json_schema": SCHEMA}
    tools = {"tools": [{"name": "now", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
    guided = {"max_tokens": 40, "guided_json": SCHEMA["schema"]}
    requests = {
        "chat": ("/v1/chat/completions", {**CHAT, "response_format": form, "logprobs": True}),
        "forced call": ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": "required"}),
        "completion": ("/v1/completions", {**BODIES[COMPLETIONS], **guided}),
        "responses": ("/v1/responses", {**BODIES[RESPONSES], "text": {"format": {"type": "json_schema", **SCHEMA}}}),
        "messages": ("/v1/messages", {**CHAT, "max_tokens": 500, **tools}),
    }

    def otherwise(tensors: dict) -> list[Step]:
        """The first replica would have said something else."""
        engine.text, engine.cut = ('{ "city": "Rome, or', 9) if not engine.asked else (said, None)
        return engine(tensors)

    async with two(card, lambda tensors: script(tensors)) as client:
        for name, (path, body) in requests.items():
            called = "call" in name or name == "messages"
            said = '[{"name": "now", "arguments": {"zone": "Paris 🙂"}}]' if called else '{"city": "Paris 🙂"}'
            engine.text, engine.cut, script = said, None, engine
            whole = await client.post(path, json={**body, "temperature": 0.7})
            assert whole.status_code == 200, whole.text
            engine.asked.clear()
            script = otherwise
            anew = await client.post(path, json={**body, "temperature": 0.7})
            assert told(anew.text) == told(whole.text), name
            assert "x-llmops-continued" not in anew.headers
            first, second = ((one["input_ids"], one["guided_decoding_guide"]) for one in engine.asked)
            assert first == second
        assert f'llmops_failovers_total{{reason="lost"}} {len(requests)}' in (await client.get("/metrics")).text


SCHEMA = {"name": "where", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
