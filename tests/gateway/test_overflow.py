"""Overflow to another OpenAI-compatible provider: a second gateway of ours, and a scripted server for its faults."""

import asyncio
import contextlib
import json
import logging
import re
import threading
import time

import httpx
import pytest

from llmops.errors import InputError
from llmops.fair_client import fair_client
from llmops.gateway.interfaces import Usage
from llmops.gateway.routing.providers import Providers, ProviderStream
from llmops.gateway.routing.providers import _lines as provider_lines
from llmops.gateway.safety.rules import RuleFilter
from llmops.gateway.safety.stream_guard import SEARCH_STEP
from llmops.gateway.settings import GatewaySettings
from llmops.store.accounts.limits import Budget, Limits
from llmops.store.factory import open_store
from llmops.store.prices import Price, set_price
from tests.support.accounts import BY, add_key
from tests.support.browser import ask, browser_page, started_browser
from tests.support.gateway_stack import BODIES, CHAT, RESPONSES, Stack, running, text_of
from tests.support.gateway_stack import MESSAGES as ANTHROPIC
from tests.support.scripted_triton import Step
from tests.support.usage_rows import billed_rows
from tests.support.waiting import GENEROUS, eventually

SECRET = "sk-do-not-show-me"
MESSAGES = [{"role": "user", "content": "Hello"}]


def settings_for(url: str, tenants: tuple[str, ...] = ("*",), **fields) -> dict:
    provider = {"url": f"{url}/v1", "key_env": "PROVIDER_KEY", "tenants": list(tenants), "timeout": "2s", **fields}
    return {"aliases": {"best": ["tiny", "cloud/big"]}, "providers": {"cloud": provider}}


@contextlib.asynccontextmanager
async def overflowing(card, tokenizer, away: bool = True, **settings):
    """A gateway whose own model is away, and whose alias `best` overflows."""
    async with running(card, tokenizer, **settings) as stack:
        stack.say("I am tiny.")
        if away:
            stack.triton.engine_ready = False
            await eventually(lambda: not is_ready(stack))
        stack.chat_body["model"] = "best"
        yield stack


def is_ready(stack: Stack) -> bool:
    return stack.server.config.app.state.service.models.is_ready("tiny")


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("PROVIDER_KEY", SECRET)


@pytest.fixture
async def provider(card, tokenizer):
    """A second gateway, which serves `big`."""
    async with running({**card, "name": "big"}, tokenizer) as stack:
        stack.say("I am big.")
        yield stack


class ScriptedProvider:
    """An HTTP server that answers every request with the given bytes, then waits or closes."""

    def __init__(self) -> None:
        self.answer, self.hangs, self.seen = b"", False, []

    async def serve(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length:")[1].split()[0])
        self.seen.append((head, json.loads(await reader.readexactly(size))))
        writer.write(self.answer)
        await writer.drain()
        if self.hangs:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()

    def says(self, *chunks: dict | str, status="200 OK", kind="text/event-stream", more="") -> None:
        body = "".join(f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in chunks)
        self.answer = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{more}connection: close\r\n\r\n{body}".encode()


@pytest.fixture
async def scripted():
    made = ScriptedProvider()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


def said(answer) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def delta(finish: str | None = None, **fields) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


async def test_every_chat_api_overflows_while_the_model_is_away_and_says_who_answered(card, tokenizer, provider):
    async with overflowing(card, tokenizer, **settings_for(provider.url)) as own:
        for path, fields in [
            (CHAT, {}),
            (CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
            *((path, {"stream": stream}) for path in (RESPONSES, ANTHROPIC) for stream in (False, True)),
            ("/api/chat/completions", {"messages": MESSAGES, "stream": True}),
        ]:
            answer = await own.client.post(path, json={**BODIES.get(path, {}), **fields, "model": "best"})
            assert (answer.status_code, answer.headers["x-llmops-model"]) == (200, "cloud/big")
            # the pieces of a stream, or the whole text, whatever the API calls them
            assert "I am big." in "".join(re.findall(r'"(?:content|delta|text)": ?"([^"]*)"', answer.text))
            assert SECRET not in answer.text
            if path == CHAT:
                direct = (await provider.chat(model="big")).json()["usage"]["prompt_tokens"]
                assert f'"prompt_tokens":{direct}' in answer.text.replace(" ", "")


async def test_answers_of_a_provider_share_a_connection(card, tokenizer, provider):
    async with overflowing(card, tokenizer, **settings_for(provider.url)) as own:
        before = provider.server.server_state.total_requests
        for stream in (False, True, False):
            assert (await own.chat(stream=stream)).status_code == 200
        assert provider.server.server_state.total_requests == before + 3
        # the other is the test's own
        assert len(provider.server.server_state.connections) == 2


async def test_a_provider_that_leaves_its_connection_open_has_reported_its_usage(scripted, monkeypatch):
    """Before the fix, an answer whose client left meanwhile was billed by an estimate."""
    monkeypatch.setattr("llmops.gateway.routing.providers.END_TIMEOUT", 2 * GENEROUS)
    scripted.hangs = True
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    scripted.says(delta(content="Hi"), delta("stop"), {"choices": [], "usage": usage}, "[DONE]")
    providers = Providers(GatewaySettings(**settings_for(scripted.url, timeout="4m")))
    stream = ProviderStream(providers.models["best"][0].provider, {"messages": MESSAGES}, 100, "")
    await eventually(lambda: stream.usage == Usage(7, 3))
    stream.cancel()
    await providers.close()


@pytest.mark.parametrize(
    ("tenants", "scope", "cached"),
    [
        (["acme"], "tenant", 5),
        (["acme", "beta"], "tenant", None),
        (["*"], "tenant", None),
        (["*"], "shared", 5),
    ],
)
async def test_counts_of_a_provider_tell_no_tenant_what_another_asked(scripted, tenants, scope, cached):
    """Before the fix, a tenant that guessed another's prompt was told that the provider had it cached."""
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    scripted.says(delta("stop", content="Hi"), {"choices": [], "usage": usage}, "[DONE]")
    providers = Providers(GatewaySettings(**settings_for(scripted.url, tenants=tenants), cache_scope=scope))
    stream = ProviderStream(providers.models["best"][0].provider, {"messages": MESSAGES}, 100, "")
    await eventually(lambda: stream.usage is not None)
    assert stream.usage == Usage(7, 3, 0, cached)
    await providers.close()


async def test_an_alias_that_chooses_a_model_overflows_too(card, tokenizer, provider):
    given = settings_for(provider.url)
    given["aliases"] = {"best": {"small": "tiny", "large": "larger", "overflow": ["cloud/big"]}}
    async with overflowing(card, tokenizer, **given) as own:
        answer = await own.chat()
        assert said(answer) == "I am big."
        assert (answer.headers["x-llmops-model"], answer.headers["x-llmops-route"]) == ("cloud/big", "fallback")
        own.triton.engine_ready = True
        await eventually(lambda: is_ready(own))
        assert (await own.chat()).headers["x-llmops-model"] == "tiny"


async def test_overflow_needs_a_full_or_missing_model_and_a_chat(card, tokenizer, provider):
    given = settings_for(provider.url) | {"limits": {"queued": 0}}
    async with overflowing({**card, "max_batch_size": 1}, tokenizer, away=False, **given) as own:
        answer = await own.chat()
        assert (answer.headers["x-llmops-model"], said(answer)) == ("tiny", "I am tiny.")
        own.steps(*[Step((own.tokenizer.encode("x")[0],), wait=0.2) for _ in range(300)])
        async with own.client.stream("POST", CHAT, json={"model": "tiny", "stream": True, "messages": MESSAGES}):
            await eventually(lambda: own.triton.active == 1)
            assert (await own.chat(model="tiny")).status_code == 503
            answer = await own.chat()
            assert said(answer) == "I am big."
            text = await own.client.post("/v1/completions", json={"model": "best", "prompt": "Hello"})
            assert text.status_code == 503
            # what a provider cannot do is no reason to answer otherwise than asked
            for field, value in (("guided_choice", ["a", "b"]), ("prompt_logprobs", 0)):
                needed = await own.chat(**{field: value})
                assert (needed.status_code, field in needed.text) == (503, True), needed.text
            # a request that came from another gateway's overflow goes no further
            looped = await own.client.post(CHAT, json=own.chat_body, headers={"x-llmops-overflow": "1"})
            assert looped.status_code == 503
        assert (await own.chat(model="cloud/big")).status_code == 404


async def test_tool_calls_thinking_and_counts_come_as_the_provider_sent_them(card, tokenizer, scripted):
    counts = {"prompt_tokens": 11, "completion_tokens": 7}
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": ""}}
    scripted.says(
        delta(role="assistant", content="", reasoning_content="Let me see."),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        delta("tool_calls"),
        {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 5}}},
        "[DONE]",
    )
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    async with overflowing(card, tokenizer, **settings_for(scripted.url)) as own:
        for answer in (await own.chat(tools=tools, top_k=5), await own.chat(tools=tools)):
            choice, usage = answer.json()["choices"][0], answer.json()["usage"]
            assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "Let me see.")
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"a":1}'}
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 7)
            assert usage["prompt_tokens_details"]["cached_tokens"] == 5
        head, sent = scripted.seen[0]
        assert f"authorization: Bearer {SECRET}" in head
        assert (sent["model"], sent["stream"], "top_k" in sent, "user" in sent) == ("big", True, False, False)


FAULTS = {
    "html": ({"kind": "text/html", "chunks": ["<html>Sign in</html>"]}, 502, "provider_failed"),
    "busy": ({"status": "429 Too Many", "more": "retry-after: 7\r\n"}, 503, "provider_busy"),
    "key": ({"status": "401 Unauthorized", "chunks": [f"Incorrect API key {SECRET}"]}, 502, "provider_failed"),
    "bad request": ({"status": "400 Bad Request"}, 502, "provider_failed"),
    "moved": ({"status": "302 Found", "more": "location: http://127.0.0.1:1/\r\n"}, 502, "provider_failed"),
    "no json": ({"chunks": ["{nonsense"]}, 502, "provider_failed"),
    "wrong types": ({"chunks": [delta(content=5)]}, 502, "provider_failed"),
    "unasked choice": ({"chunks": [{"choices": [{"index": 7, "delta": {"content": "x"}}]}]}, 502, "provider_failed"),
    "error event": ({"chunks": [{"error": {"message": SECRET}}]}, 502, "provider_failed"),
    "nothing": ({}, 502, "provider_failed"),
    "endless line": ({"chunks": ["x" * 2_000_000]}, 502, "provider_failed"),
    "hangs": ({"hangs": True}, 503, "provider_unavailable"),
}


async def test_a_provider_that_fails_before_the_first_token_is_one_clear_error(card, tokenizer, scripted, caplog):
    caplog.set_level(logging.INFO)
    async with overflowing(card, tokenizer, **settings_for(scripted.url, timeout="0.5s")) as own:
        for fault, (script, status, code) in FAULTS.items():
            scripted.hangs = script.get("hangs", False)
            how = {name: script[name] for name in ("status", "kind", "more") if name in script}
            scripted.says(*script.get("chunks", ()), **how)
            for stream in (False, True):
                answer = await own.chat(stream=stream)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (fault, answer.text)
                assert ("cloud" in answer.json()["error"]["message"], SECRET in answer.text) == (True, False)
                if fault == "busy":
                    assert answer.headers["retry-after"] == "7"
    assert SECRET not in caplog.text


async def test_a_provider_that_is_cut_off_ends_the_stream_with_an_error(card, tokenizer, scripted):
    scripted.says(delta(content="Half an "), delta(content="answer"))
    async with overflowing(card, tokenizer, **settings_for(scripted.url)) as own:
        events = await own.events()
        assert text_of([one for one in events if "error" not in one]) == "Half an answer"
        assert (events[-1]["error"]["code"], (await own.chat()).status_code) == ("provider_failed", 502)


async def test_callers_take_turns_for_the_connections_of_a_provider(card, tokenizer, scripted):
    """Before, they waited in the order of their arrival: one caller's flood held up the chats of all others."""
    scripted.says(delta(content="Hi"))
    scripted.hangs = True
    async with overflowing(card, tokenizer, **settings_for(scripted.url, concurrent=1, timeout="60s")) as own:

        def ask(text: str) -> dict:
            messages = [{"role": "user", "content": text}]
            return {"headers": {"x-api-key": text}, "json": {"model": "best", "stream": True, "messages": messages}}

        async with own.client.stream("POST", CHAT, **ask("evil")) as held:
            lines, waiting = held.aiter_lines(), []
            await anext(lines)
            for text in ["evil"] * 5 + ["other"]:
                waiting.append(asyncio.create_task(own.client.post(CHAT, **ask(text))))
                await eventually(lambda: provider_requests() == 1 + len(waiting))
            scripted.says(delta("stop", content="Hi"), "[DONE]")
            scripted.hangs = False
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}
    assert "other" in [body["messages"][0]["content"] for _, body in scripted.seen[:3]]


def provider_requests() -> int:
    return sum(task.get_name() == "provider-cloud" for task in asyncio.all_tasks())


async def test_a_client_that_leaves_ends_the_provider_s_answer(card, tokenizer, provider):
    provider.steps(*[Step((provider.tokenizer.encode("x")[0],), wait=0.05) for _ in range(400)])
    async with overflowing(card, tokenizer, **settings_for(provider.url)) as own:
        async with own.client.stream("POST", CHAT, json={**own.chat_body, "stream": True}) as answer:
            await anext(answer.aiter_lines())
            assert provider.triton.active == 1
        await provider.idle()


async def test_a_long_conversation_is_cut_to_the_context_of_a_provider(card, tokenizer, scripted, tmp_path):
    scripted.says(delta("stop", content="Hi"), "[DONE]")
    settings = {**settings_for(scripted.url, context=2000), "store": f"sqlite:///{tmp_path}/store.db", "open": True}
    async with overflowing(card, tokenizer, **settings) as own:
        items = [{"type": "message", "role": "user", "content": text * 4000} for text in ("a", "b")]
        made = await own.client.post("/v1/conversations", json={"items": items})
        body = {**BODIES[CHAT], "model": "best", "conversation_id": made.json()["id"], "messages": MESSAGES}
        answer = await own.client.post("/api/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-llmops-dropped-messages"]) == (200, "1")
    assert [len(one["content"]) for one in scripted.seen[0][1]["messages"]] == [4000, 5]


async def test_a_request_that_is_cancelled_at_any_moment_leaves_its_connection_to_others():
    """Before, 64 clients that left in these moments took all connections to a provider, until a restart."""

    async def serve(reader, writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nHi")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    limits = httpx.Limits(max_connections=1, keepalive_expiry=4)
    async with server, fair_client(limits=limits, timeout=httpx.Timeout(5, pool=0.5)) as client:
        for moments in range(60):
            left = asyncio.create_task(client.get(url))
            for _ in range(moments):
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait([left])
            assert (await client.get(url)).text == "Hi", moments


@pytest.mark.parametrize("mode", ["hold", "cut"])
async def test_the_filters_of_a_tenant_hold_for_a_provider(card, tokenizer, scripted, mode):
    # a rule in `cut` is searched every SEARCH_STEP characters: what comes later must not leave
    pieces = ["All is well. ", "The word is for", "bid", "den and " + "so on " * SEARCH_STEP, "and more follows."]
    scripted.says(*[delta(content=one) for one in pieces], delta("stop"), "[DONE]")
    rules = {"kind": "rules", "words": ["forbidden"]}
    safety = {"filters": {"words": rules}, "policy": {"prompt": ["words"], "answer": {"words": mode}}}
    async with overflowing(card, tokenizer, safety=safety, **settings_for(scripted.url)) as own:
        choice = (await own.chat()).json()["choices"][0]
        assert choice["finish_reason"] == "content_filter"
        assert "more follows" not in choice["message"]["content"]
        if mode == "hold":
            assert choice["message"]["content"].startswith("All is well.")
            assert "for" not in choice["message"]["content"]
        asked = len(scripted.seen)
        refused = await own.chat(messages=[{"role": "user", "content": "a forbidden word"}])
        assert (refused.status_code, len(scripted.seen)) == (400, asked)


async def test_a_line_that_comes_in_small_pieces_takes_linear_time():
    """Before the fix, a line of a megabyte in pieces of ten bytes took 54 s, as each piece copied the line."""

    class Response:
        async def aiter_raw(self):
            for _ in range(20_000):
                yield b"x" * 50
            yield b"\r\n\ny\n"

    began = time.process_time()
    assert [len(line) async for line in provider_lines(Response())] == [1_000_000, 0, 1]
    assert time.process_time() - began < 2


async def test_rules_search_a_providers_large_delta_in_a_thread(card, tokenizer, scripted, monkeypatch):
    """Before the fix, a delta of a megabyte held all requests up for 0.15 s, and with other words for seconds."""
    searched: list[tuple[int, bool]] = []
    search = RuleFilter.search

    def noted(self, text: str, start: int = 0):
        searched.append((len(text), threading.current_thread() is threading.main_thread()))
        return search(self, text, start)

    monkeypatch.setattr(RuleFilter, "search", noted)
    large = "so on " * 5000
    scripted.says(delta(content=large), delta("stop"), "[DONE]")
    safety = {"filters": {"words": {"kind": "rules", "words": ["forbidden"]}}, "policy": {"answer": {"words": "hold"}}}
    async with overflowing(card, tokenizer, safety=safety, **settings_for(scripted.url)) as own:
        choice = (await own.chat(max_tokens=1000)).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", large)
    assert max(searched) >= (len(large), False)
    assert not [size for size, on_loop in searched if on_loop and size > 10_000]


USER = MESSAGES[0]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def called(**call) -> list[dict]:
    tool = {"role": "tool", "tool_call_id": call.get("id", "c"), "content": "x"}
    return [USER, {"role": "assistant", "content": "x", "tool_calls": [{**CALL, **call}]}, tool]


def schema(**fields) -> dict:
    described = {"type": "object", "properties": {"a": {"type": "string", "description": SECRET}}}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": described, **fields}}


#: Requests with the secret where a provider may read it, although no text of the chat has it.
HIDDEN = {
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]},
    "file": {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": SECRET}}]}]},
    "field of a part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": SECRET}]}]},
    "field of a message": {"messages": [{**USER, "more": SECRET}]},
    "deprecated call": {
        "messages": [USER, {"role": "assistant", "function_call": CALL["function"] | {"name": SECRET}}]
    },
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "x", "reasoning": {"a": SECRET}}, USER]},
    "id of a call": {"messages": called(id=SECRET)},
    "field of a call": {"messages": called(more=SECRET)},
    "field of a function": {"messages": called(function={**CALL["function"], "more": SECRET})},
    "field of a tool": {"tools": [{**FUNCTION, "more": SECRET}]},
    "description of a schema": {"response_format": schema()},
    "name of a schema": {"response_format": schema(name=SECRET)},
    "stop": {"stop": [SECRET]},
    "tool choice": {"tools": [FUNCTION], "tool_choice": {**FUNCTION, "more": SECRET}},
    "effort": {"reasoning_effort": SECRET},
}


async def test_no_field_of_a_chat_reaches_a_provider_past_filters(card, tokenizer, scripted):
    scripted.says(delta("stop", content="Hi"), "[DONE]")
    safety = {"filters": {"words": {"kind": "rules", "words": [SECRET]}}, "policy": {"prompt": ["words"]}}
    async with overflowing(card, tokenizer, safety=safety, **settings_for(scripted.url)) as own:
        for name, fields in HIDDEN.items():
            answer = await own.client.post(CHAT, json={"model": "best", "messages": MESSAGES, **fields})
            assert answer.status_code in (200, 400), name
            assert not [body for _, body in scripted.seen if SECRET in json.dumps(body)], name
        thought = {"role": "assistant", "content": "x", "reasoning": "so"}
        assert (await own.chat(messages=[USER, thought, USER])).status_code == 200
    assert (len(scripted.seen), scripted.seen[-1][1]["messages"][1]) == (8, thought)


async def test_the_schema_of_an_answer_counts_at_a_provider(card, tokenizer, scripted):
    quotas = {"each": {"tpm": 1000}}
    async with overflowing(card, tokenizer, quotas=quotas, **settings_for(scripted.url)) as own:
        answer = await own.chat(response_format=schema(description="a" * 9000), max_tokens=1)
    assert (answer.status_code, scripted.seen) == (429, [])


async def test_a_tenant_is_allowed_first_and_pays_the_provider_s_price(card, tokenizer, scripted, tmp_path):
    scripted.says(
        delta(content="Yes."), delta("stop"), {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 3}}
    )
    url = f"sqlite:///{tmp_path}/store.db"
    limits, headers = Limits(budget=Budget(200_000, "month")), {}
    async with await open_store(url) as store:
        for tenant in ("other", "acme"):
            secret, key_id, _ = await add_key(store, tenant, limits=limits)
            headers[tenant] = {"authorization": f"Bearer {secret}"}
        async with store.write() as connection:
            # a token of `tiny` costs a tenth of one of the provider
            await set_price(connection, Price("tiny", BY.at, 10**8, 10**8, 10**8), BY)
            await set_price(connection, Price("cloud/big", BY.at, 10**9, 10**9, 2 * 10**9), BY)
        settings = settings_for(scripted.url, tenants=("acme",)) | {"store": url, "port": 0}
        settings["usage"] = {"outbox": tmp_path / "usage"}
        async with overflowing(card, tokenizer, **settings) as own:

            async def ask(tenant: str, **fields):
                return await own.client.post(CHAT, json={**own.chat_body, **fields}, headers=headers[tenant])

            # a tenant without permission gets what its own model says
            assert ((await ask("other")).headers["x-llmops-model"], scripted.seen) == ("tiny", [])
            answer = await ask("acme", max_tokens=20)
            assert (answer.status_code, answer.headers["x-llmops-model"]) == (200, "cloud/big"), answer.text

            async def row():
                return next((one for one in await billed_rows(store) if one["key_id"] == key_id), None)

            await eventually(row)
            row = await row()
            assert (row["model"], row["input_tokens"], row["output_tokens"]) == ("cloud/big", 20, 3)
            assert (row["cost_micros"], row["replica"]) == (20 * 1000 + 3 * 2000, "cloud")
            # $0.174 is left: too little for 100 tokens, so that the provider is asked for fewer
            await ask("acme", max_tokens=100)
            assert 0 < scripted.seen[-1][1]["max_tokens"] < 100
            broke = await ask("acme", max_tokens=20, messages=[{"role": "user", "content": "word " * 1000}])
            assert (broke.status_code, broke.json()["error"]["code"]) == (429, "insufficient_quota")
        assert SECRET.encode() not in (tmp_path / "store.db").read_bytes()


async def test_the_list_of_models_has_an_alias_that_only_a_provider_answers(card, tokenizer, provider):
    async with overflowing(card, tokenizer, **settings_for(provider.url)) as own:
        models = {one["id"]: one for one in (await own.client.get("/v1/models")).json()["data"]}
        assert (models["best"]["ready"], models["best"]["target"]) == (True, "provider cloud")
        assert "cloud/big" not in models


async def test_a_key_is_read_from_a_file_and_a_missing_one_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    given = {"url": "https://cloud.example/v1"}
    found = Providers(GatewaySettings(providers={"cloud": {**given, "key_file": file}}))
    assert SECRET not in repr(vars(found))
    await found.close()
    monkeypatch.delenv("PROVIDER_KEY")
    for key in ({"key_env": "PROVIDER_KEY"}, {"key_file": tmp_path / "absent"}):
        with pytest.raises(InputError, match=r"key of the provider cloud|provider cloud has no usable key"):
            Providers(GatewaySettings(providers={"cloud": {**given, **key}}))


async def test_the_page_shows_a_tool_call_as_it_arrives_and_who_answered(card, tokenizer, scripted):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1'}}
    scripted.says(delta(content="Let me look."), delta(tool_calls=[call]))
    scripted.hangs = True
    async with (
        overflowing(card, tokenizer, **settings_for(scripted.url, timeout="60s")) as own,
        started_browser() as browser,
        browser_page(browser) as page,
    ):
        await page.goto(own.url)
        await page.locator("#model").select_option("best")
        await ask(page, "Find it")
        live = page.locator(".turn.assistant[aria-busy]")
        await live.get_by_text("Calls find …").click()
        assert await live.locator("pre").inner_text() == '{"a": 1'
        await page.locator("#message").press("Escape")
        done = page.locator(".turn.assistant:not([aria-busy])")
        await done.get_by_text("This answer was stopped.").wait_for()
        assert (await done.locator(".figures").inner_text()).startswith("cloud/big · ")
        await done.get_by_text("Calls find").wait_for()


async def test_the_names_of_called_functions_are_estimated_too(card, tokenizer, scripted):
    """Before the fix, fifty names of 60 characters were billed as 50 tokens, one for each event."""
    calls = [
        {"index": at, "id": f"call_{at}", "type": "function", "function": {"name": "find" * 15, "arguments": "{}"}}
        for at in range(50)
    ]
    scripted.says(*(delta(tool_calls=[call]) for call in calls), delta("tool_calls"), "[DONE]")
    tools = [{"type": "function", "function": {"name": "find" * 15, "parameters": {"type": "object"}}}]
    async with overflowing(card, tokenizer, **settings_for(scripted.url)) as own:
        usage = (await own.chat(tools=tools, max_tokens=2000)).json()["usage"]
    assert usage["completion_tokens"] == 50 * 62 // 3


async def test_a_provider_bills_no_more_than_the_request_and_its_context_allow(card, tokenizer, scripted):
    two_billion = dict.fromkeys(("prompt_tokens", "completion_tokens"), 2**31 - 1)
    async with overflowing(card, tokenizer, **settings_for(scripted.url, context=1000)) as own:
        for chunks, billed in [
            # before the fix: 400 tokens of 50, one for each piece
            ([*(delta(content="a ") for _ in range(400)), delta("stop"), "[DONE]"], (10, 50)),
            # before the fix: two billion tokens, on the caller's bill
            ([delta("stop", content="Hi"), {"choices": [], "usage": two_billion}, "[DONE]"], (1000, 50)),
        ]:
            scripted.says(*chunks)
            events = await own.events(max_tokens=50, stream_options={"include_usage": True})
            usage = next(one["usage"] for one in events if isinstance(one, dict) and one.get("usage"))
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == billed


@pytest.mark.parametrize(
    "counts",
    [7, [], {}, {"prompt_tokens": -1}, {"prompt_tokens": "11"}, {"prompt_tokens": 2**31, "completion_tokens": 7},
     {"prompt_tokens": 11, "prompt_tokens_details": {"cached_tokens": -1}}],
)  # fmt: skip
async def test_an_answer_with_unusable_counts_is_given_and_estimated(card, tokenizer, scripted, counts):
    """Before the fix, an unstreamed answer was a 502 that was billed by estimate, and a stream ended with an error."""
    scripted.says(delta(content="Hi there."), delta("stop"), {"choices": [], "usage": counts}, "[DONE]")
    async with overflowing(card, tokenizer, **settings_for(scripted.url)) as own:
        answer = await own.chat()
        assert (answer.status_code, said(answer)) == (200, "Hi there.")
        events = await own.events(stream_options={"include_usage": True})
        assert text_of(events[:-2]) == "Hi there."
        assert events[-2]["usage"] == answer.json()["usage"]
        assert answer.json()["usage"]["completion_tokens"] == 3


async def test_names_of_unknown_fields_are_shown_as_with_an_engine(card, tokenizer, scripted, caplog):
    """Before, they were written raw into a header: no answer, a traceback in the log, and spans of any size."""
    scripted.says(delta(content="Hi"), delta("stop"))
    odd = ["a\r\nx-forged: 1", "a \u2028 b", "b" * 9000, *(f"f{at}" for at in range(300))]
    async with overflowing(card, tokenizer, **settings_for(scripted.url)) as own:
        for names in [[name] for name in odd[:3]] + [odd]:
            body = {"model": "best", "messages": MESSAGES, "top_k": 3, **dict.fromkeys(names, 1)}
            answer = await own.client.post(CHAT, content=json.dumps(body))
            assert (answer.status_code, "x-forged" in answer.headers) == (200, False)
            assert "top_k" in answer.headers["x-llmops-ignored"]
            assert len(answer.headers["x-llmops-ignored"]) < 4096
    assert "Traceback" not in caplog.text
