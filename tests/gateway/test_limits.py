"""Tests of limits on what a client can make grow, and of the errors beyond them.

These are headers, connections, bodies, queues, and silence.
"""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.api import chat_completions
from llmops.gateway.errors import UnavailableError
from llmops.gateway.generation import chat_generation
from llmops.gateway.http import connection_limits
from llmops.gateway.http.limited_protocol import LimitedHttpProtocol
from llmops.gateway.http.request_body import SLICE_BYTES, BodyReader, json_cost_outside_strings
from llmops.gateway.http.request_context import RequestContext, client_network
from llmops.gateway.interfaces import Caller, Outcome
from llmops.gateway.ratelimit.buffered_bytes import BufferedBytes
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.settings import RequestLimits
from llmops.gateway.telemetry import event_loop_lag
from tests.support.gateway_stack import BODIES, CHAT, COMPLETIONS, RESPONSES, running, text_of
from tests.support.scripted_triton import Step
from tests.support.waiting import GENEROUS, eventually, stop_tasks

POST = b"POST %b HTTP/1.1\r\nhost: x\r\n" % CHAT.encode()


async def connect(stack, **options):
    return await asyncio.open_connection(stack.client.base_url.host, stack.client.base_url.port, **options)


async def answer_to(stack, *pieces: bytes) -> bytes:
    """All that comes back for raw bytes, until the gateway closes."""
    reader, writer = await connect(stack)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), GENEROUS)
    except ConnectionError:
        pass
    try:
        return await asyncio.wait_for(reader.read(), GENEROUS)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def error_in(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_an_endless_header_is_refused(stack):
    endless = {
        b"GET /health/live HTTP/1.1\r\nhost: x\r\na: ": b"x", b"GET /health/live?": b"x",
        b"GET / HTTP/1.1\r\n": b"a: b\r\n", b"\r\n": b"\r\n",
    }  # fmt: skip
    for start, line in endless.items():
        answer = await answer_to(stack, start, *[line * (16384 // len(line))] * 40)
        assert error_in(answer) == (431, "header_too_large"), start
    # a trailer without end is cut
    await answer_to(stack, POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", *[b"x" * 16384] * 12)
    assert 'llmops_refused_connections_total{reason="header_bytes"} 5.0' in (await stack.client.get("/metrics")).text


async def test_a_large_body_behind_a_header_within_the_limit_and_chunks_of_one_byte_are_no_header(stack):
    """All chunks are longer than a header may be; their framing exceeds their content by less than 64 KiB."""
    stack.say("Hello")
    whole, small = (json.dumps({**stack.chat_body, "user": "u" * size}).encode() for size in (300_000, 13_000))
    head = POST + b"connection: close\r\n"
    padded = head + b"x-pad: %b\r\ncontent-length: %d\r\n\r\n" % (b"p" * 60_000, len(whole))
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in small)
    for pieces in ([padded + whole], [head + b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n"]):
        assert (await answer_to(stack, *pieces)).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def protocols(monkeypatch):
    """The connections to the gateway, oldest first; what they would do in seconds is done by hand."""
    made: list[LimitedHttpProtocol] = []
    connection_made = LimitedHttpProtocol.connection_made

    def note(protocol, transport) -> None:
        made.append(protocol)
        connection_made(protocol, transport)

    monkeypatch.setattr(LimitedHttpProtocol, "connection_made", note)
    return made


async def late_after(stack, protocols, sent: bytes) -> bytes:
    """Return the answer to a connection that sent `sent` and then nothing until the timeout."""
    reader, writer = await connect(stack)
    try:
        address = writer.get_extra_info("sockname")
        await eventually(lambda: any(one.client == address for one in protocols))
        protocol = next(one for one in protocols if one.client == address)
        writer.write(sent)
        started = b"" if not sent.startswith(COMPLETE) else await reader.readuntil(b'{"status":"live"}')
        partial = not sent.endswith(b"\r\n\r\n") and bool(sent)
        await eventually(lambda: protocol._timer is not None and (protocol._head > 0) == partial)
        protocol._timer.cancel()
        protocol._header_timed_out()
        return started + await asyncio.wait_for(reader.read(), GENEROUS)
    finally:
        writer.close()


COMPLETE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_slow_header_of_each_request_and_a_silent_connection_are_closed(protocols, stack):
    late = await late_after(stack, protocols, b"GET /health/live HTTP/1.1\r\nhost: ")
    assert (error_in(late), await late_after(stack, protocols, b"")) == ((408, "request_timeout"), b"")
    first, _, second = (await late_after(stack, protocols, COMPLETE + b"GET /health")).partition(b'{"status":"live"}')
    assert first.startswith(b"HTTP/1.1 200 ")
    assert error_in(second) == (408, "request_timeout")


async def test_many_small_requests_in_one_piece_are_no_large_header(stack):
    one = COMPLETE.replace(b"live", b"live?" + b"x" * 1000)
    assert len(one) * 200 > 3 * 2**16
    assert (await answer_to(stack, one * 200 + LAST)).count(b"HTTP/1.1 200 ") == 201


SLOW = {
    "one byte": POST + b"content-length: 100\r\n\r\n{",
    "nothing": POST + b"content-length: 100\r\n\r\n",
    "no chunk": POST + b"transfer-encoding: chunked\r\n\r\n",
    # at 1 KiB/s it would have hours
    "most of it at once": POST + b"content-length: 10000001\r\n\r\n" + b" " * 10_000_000,
}


@pytest.mark.parametrize("name", SLOW)
async def test_a_slow_body_is_408_and_closed(card, tokenizer, monkeypatch, name):
    holders: list[BufferedBytes] = []
    take = BufferedBytes.take
    monkeypatch.setattr(BufferedBytes, "take", lambda self, *given: (holders.append(self), take(self, *given))[1])
    async with running(card, tokenizer, timeouts={"body": "0.3s"}) as stack:
        answer = await answer_to(stack, SLOW[name])
        assert (error_in(answer), b"connection: close" in answer) == ((408, "request_timeout"), True)
        assert bool(holders) == (not name.startswith("no"))
        assert all(one.held == 0 for one in holders)


@given(st.floats(0, 1e5), st.integers(0, 2**24))
def test_a_body_has_its_patience_for_each_part_and_ten_times_for_all(passed, size):
    left = BodyReader(RequestLimits(), 30.0, lambda size, context: None, FairSlots(1).slot).seconds_left(passed, size)
    assert left <= 30
    assert (left > 0) == (passed < min(300, 30 + size / 1024))


UNREAD = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n"


async def test_an_answer_that_nobody_reads_is_dropped(card, tokenizer, monkeypatch):
    monkeypatch.setattr("llmops.gateway.http.server.SEND_BUFFER_BYTES", 4096)
    async with running(card, tokenizer, timeouts={"client": "0.3s"}) as stack:
        # left, closing, paused
        sent = (UNREAD + b"\r\n", UNREAD + b"connection: close\r\n\r\n", (UNREAD + b"\r\n") * 100)
        for count, asked in enumerate(sent, 1):
            with socket.socket() as silent:
                silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                silent.connect((stack.client.base_url.host, stack.client.base_url.port))
                silent.sendall(asked)
                await eventually_counted(stack, 'llmops_refused_connections_total{reason="client"}', count)


async def one_more_asks(stack) -> asyncio.StreamWriter:
    """Another connection, whose request the engine has and does not answer."""
    stack.steps(Step(hang=True))
    body, before = json.dumps(stack.chat_body).encode(), stack.triton.active
    _, writer = await connect(stack)
    writer.write(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    await eventually(lambda: stack.triton.active == before + 1)
    return writer


async def test_connections_over_the_limit_are_told_and_logged(card, tokenizer, caplog):
    async with running(card, tokenizer, limits={"connections": 4, "connections_per_client": 0}) as stack:
        # the last takes the place of the client's own, which is idle
        held = [await one_more_asks(stack) for _ in range(4)]
        assert error_in(await answer_to(stack)) == (503, "overloaded")
        assert "4 connections are open" in caplog.text
        for writer in held:
            writer.close()
            await writer.wait_closed()
        bounds = stack.server.config.http_protocol_class.limits
        await eventually(lambda: bounds.open == 0)
        assert (await answer_to(stack, LAST)).startswith(b"HTTP/1.1 200 ")
    assert bounds.open == 0
    assert not bounds.clients


LAST = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(("share", "most"), [(3, 3), (None, 4)])
async def test_one_address_has_its_share_of_the_connections(card, tokenizer, caplog, share, most):
    async with running(card, tokenizer, limits={"connections": 8, "connections_per_client": share}) as stack:
        held = [await connect(stack) for _ in range(most - 1)]  # and the client's own
        assert error_in(await answer_to(stack)) == (503, "overloaded")
        assert f"127.0.0.1 has {most} connections, as many as limits.connections_per_client allows" in caplog.text
        reader, writer = await connect(stack, local_addr=("127.0.0.2", 0))
        writer.write(LAST)
        assert (await asyncio.wait_for(reader.read(), GENEROUS)).startswith(b"HTTP/1.1 200 ")
        for _, one in [(reader, writer), *held]:
            one.close()


def test_an_address_of_ipv6_counts_by_its_network():
    assert (client_network("10.0.0.1"), client_network("::ffff:10.0.0.1")) == ("10.0.0.1", "10.0.0.1")
    assert client_network("2001:db8:1:2:3:4:5:6") == client_network("2001:db8:1:2::7") == "2001:db8:1:2::"
    assert client_network("2001:db8:1:3::7") != client_network("2001:db8:1:2::7")


async def test_descriptors_that_run_out_are_told_in_the_log(card, tokenizer, caplog, monkeypatch):
    async with running(card, tokenizer) as stack:
        monkeypatch.setattr(connection_limits, "RESERVED_DESCRIPTORS", 2**40)
        busy = await one_more_asks(stack)  # in the place of the client's own, which is idle
        assert error_in(await answer_to(stack))[0] == 503
        assert "file descriptors in use" in caplog.text
        busy.close()


# -- bodies ----------------------------------------------------------------------------------------------------------

HOSTILE = {
    "messages": b'{"model":"tiny","messages":[%b]}' % (b"1," * 700_000 + b"1"),
    "parts": b'{"model":"tiny","messages":[{"role":"user","content":[%b]}]}' % (b"0," * 700_000 + b"0"),
    "unknown fields": b'{"model":"tiny",%b}' % b",".join(b'"u%d":1' % at for at in range(100_000)),
    "deep": b'{"model":"tiny","messages":%b' % (b"[" * 100_000),
}


async def test_a_body_of_too_many_values_is_refused_unparsed(stack):
    for name in HOSTILE:
        response = await stack.client.post(CHAT, content=HOSTILE[name])
        assert (response.status_code, "more JSON values" in response.json()["error"]["message"]) == (400, True)


async def test_a_text_of_many_commas_is_not_too_many_values(stack):
    message = {"role": "user", "content": 'x,"{[:\\' * 150_000}
    response = await stack.client.post(CHAT, json={"model": "tiny", "messages": [message]})
    assert response.json()["error"]["code"] == "context_length_exceeded"


TEXT = st.text(alphabet='a"\\,:[{é', max_size=8)
JSON = st.recursive(st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner))


@given(JSON, st.integers(0, 3))
async def test_weight_is_that_of_what_is_outside_of_texts(value, padding):
    def weigh(one) -> int:
        if isinstance(one, dict):
            return 8 + 8 * len(one) + max(len(one) - 1, 0) + sum(map(weigh, one.values()))
        if isinstance(one, list):
            return 8 + max(len(one) - 1, 0) + sum(map(weigh, one))
        return 0

    # slices are cut where it hurts
    body = b" " * (SLICE_BYTES - padding) + json.dumps(value, separators=(",", ":")).encode()
    assert await json_cost_outside_strings(body, 2**40) == weigh(value)


async def test_bytes_that_are_held_are_bounded(card, tokenizer):
    async with running(card, tokenizer, limits={"held_bytes": 20_000}) as stack:
        stack.say("Hello")
        large = json.dumps({**stack.chat_body, "user": "u" * 15_000}).encode()
        assert (await stack.client.post(CHAT, content=large)).status_code == 200
        _, writer = await connect(stack)
        writer.write(POST + b"content-length: 18000\r\n\r\n" + b" " * 10_000)
        refused = await eventually_answered(stack, 503, large)
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        writer.close()
        await eventually_answered(stack, 200, large)


async def test_no_client_holds_all_of_them():
    """Any client may use the first 10,000 of 20,000 bytes, and one address half of the others."""
    holding = BufferedBytes(20_000)
    greedy = [RequestContext(str(number), caller=Caller(share="a")) for number in range(16)]
    for one in greedy[:15]:
        holding.take(1000, one)
    with pytest.raises(UnavailableError, match="in total or from this client"):
        holding.take(1000, greedy[15])
    assert holding.held == 15_000
    late = RequestContext("late", caller=Caller(share="b"))
    holding.take(1000, late)
    holding.after(late, Outcome(200))
    assert (holding.held, late.buffered_bytes) == (15_000, 0)


async def eventually_answered(stack, status: int, body: bytes) -> httpx.Response:
    answers = []

    async def answered() -> bool:
        answers.append(await stack.client.post(CHAT, content=body))
        return answers[-1].status_code == status

    await eventually(answered)
    return answers[-1]


# -- text ------------------------------------------------------------------------------------------------------------


async def test_text_that_cannot_fit_is_not_tokenised_to_its_end(stack, monkeypatch):
    encode = type(stack.tokenizer).encode

    def small(self, text, **options):
        assert len(text) < 100_000
        return encode(self, text, **options)

    monkeypatch.setattr(type(stack.tokenizer), "encode", small)
    text = "7" * 3_000_000
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": text}), (RESPONSES, {"input": text})):
        error = (await stack.client.post(path, json={"model": "tiny", **body})).json()["error"]
        assert (error["code"], "at least" in error["message"]) == ("context_length_exceeded", True)


async def test_more_text_than_is_tokenised_for_one_request(card, tokenizer):
    async with running({**card, "max_seq_len": 10**6}, tokenizer, limits={"prompt_bytes": 1000}) as stack:
        call = {"function": {"name": "f", "arguments": "7" * 2000}}
        for path, body in [
            (CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 2000}]}]}),
            (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}),
            ("/v1/completions", {"prompt": ["x" * 600, "y" * 600]}),
            ("/tokenize", {"prompt": "x" * 2000}),
        ]:
            response = await stack.client.post(path, json={"model": "tiny", **body})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_more_ids_than_fit_are_refused_undecoded(stack, monkeypatch):
    monkeypatch.setattr(type(stack.tokenizer), "decode", lambda *args, **kwargs: pytest.fail("it was decoded"))
    refused = await stack.client.post(COMPLETIONS, json={"model": "tiny", "prompt": [5] * 100_000})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


# -- queues ----------------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_503_and_the_client_comes_again(card, tokenizer):
    async with running({**card, "max_batch_size": 1}, tokenizer, limits={"queued": 1}) as stack:
        stack.steps(Step(hang=True))
        waiting = [asyncio.create_task(stack.chat()) for _ in range(2)]
        await eventually(lambda: stack.triton.active == 2)
        refused = await stack.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert 1000 <= int(refused.headers["retry-after-ms"]) <= 4000
        assert refused.headers["x-should-retry"] == "true"
        for path in (COMPLETIONS, RESPONSES):
            assert (await stack.client.post(path, json=BODIES[path])).status_code == 503
        client = openai.AsyncOpenAI(base_url=f"{stack.client.base_url}/v1", api_key="none", max_retries=8)
        asked = asyncio.create_task(client.chat.completions.create(**stack.chat_body))
        await eventually_counted(stack, 'route="/v1/chat/completions",status="503"}', 2)
        stack.say("Hello")
        await stop_tasks(*waiting)
        assert (await asyncio.wait_for(asked, GENEROUS)).choices[0].message.content == "Hello"
        await client.close()


async def eventually_counted(stack, metric: str, least: float) -> None:
    async def counted() -> bool:
        lines = (await stack.client.get("/metrics")).text.splitlines()
        return any(metric in line and float(line.rsplit(None, 1)[1]) >= least for line in lines)

    await eventually(counted)


async def test_one_client_leaves_places_in_the_queue_for_others(card, tokenizer):
    """One in the batch and three of nine that wait: a third, as keys of one address go."""
    async with running({**card, "max_batch_size": 1}, tokenizer, limits={"queued": 9}) as stack:
        stack.steps(Step(hang=True))

        async def ask(key: str) -> httpx.Response:
            return await stack.client.post(CHAT, json=stack.chat_body, headers={"authorization": f"Bearer {key}"})

        tasks = [asyncio.create_task(ask("greedy")) for _ in range(7)]
        await eventually(lambda: stack.triton.active == 4 and sum(task.done() for task in tasks) == 3)
        refused = next(task.result() for task in tasks if task.done())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "4 answers in progress or waiting, to which one client may not add more" in refused.text
        tasks.append(asyncio.create_task(ask("modest")))
        await eventually(lambda: stack.triton.active == 5)
        await stop_tasks(*tasks)
        await stack.idle()


async def test_places_come_back_however_a_request_ends(card, tokenizer):
    async with running({**card, "max_batch_size": 1}, tokenizer, limits={"queued": 0}) as stack:
        for _ in range(3):
            stack.steps(Step(error="out of KV blocks", final=True))
            assert ((await stack.chat()).status_code, (await stack.chat(stream=True)).status_code) == (500, 500)
            assert (await stack.chat(max_tokens=10**6)).status_code == 400
            stack.say("Hello")
            assert text_of(await stack.events()) == "Hello"
            # alone it is never too many
            assert (await stack.client.post("/v1/completions", json={"model": "tiny", "prompt": ["a"] * 8})).is_success


# -- silence ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def slow(card, tokenizer):
    """A gateway that breaks a stream's silence after a tenth of a second, and an engine that waits to be let go."""
    async with running(card, tokenizer, timeouts={"keepalive": "0.1s"}) as stack:
        go = asyncio.Event()

        async def script(tensors):
            await go.wait()
            for step in stack.answer:
                yield step

        stack.triton.script, stack.go = script, go
        stack.answer = [*(Step((i,)) for i in tokenizer.encode("Hello")), Step((0,)), Step(final=True)]
        yield stack


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_http_behind_a_request_is_refused_after_its_answer(slow, caplog, stream):
    """The nonsense comes while the first request waits for the engine."""
    body = json.dumps(BODIES[RESPONSES] | {"stream": stream}).encode()
    reader, writer = await connect(slow)
    writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    if stream:  # the answer has begun: nothing can be said inside of it
        assert await asyncio.wait_for(reader.readuntil(b": "), GENEROUS)
    writer.write(b"nonsense\r\n\r\n")
    slow.go.set()
    answer, status, refusal = (await asyncio.wait_for(reader.read(), GENEROUS)).partition(b"HTTP/1.1 400 ")
    assert b"Hello" in answer
    assert error_in(status + refusal)[0] == error_in(await answer_to(slow, b"\x16\x03\x01 hello\r\n\r\n"))[0] == 400
    await slow.client.get("/health/live")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    writer.close()


async def test_a_silent_stream_says_that_it_lives(slow):
    for path in (CHAT, COMPLETIONS, RESPONSES):
        slow.go.clear()
        async with slow.client.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            assert (response.status_code, "x-request-id" in response.headers) == (200, True)
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    slow.go.set()
        assert ("Hello" in json.dumps(lines), lines[0]) == (True, ": keep-alive")


@pytest.mark.parametrize(("given", "last"), [("x", "response.completed"), ("x " * 999, "response.failed")])
@pytest.mark.parametrize("background", [True, False])
async def test_a_stream_that_waits_for_its_turn_says_that_it_lives(slow, monkeypatch, given, last, background):
    turn, plan = threading.Event(), chat_generation.prepare_chat

    def held(*asked):
        assert turn.wait(GENEROUS)
        return plan(*asked)

    monkeypatch.setattr(chat_generation, "prepare_chat", held)
    slow.go.set()
    # what is not brief is prepared in a thread
    metadata = {f"{at}": "x" * 512 for at in range(10)}
    body = {"model": "tiny", "stream": True, "background": background, "input": given, "metadata": metadata}
    lines = []
    async with slow.client.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            if line == ": keep-alive":
                turn.set()
    assert (lines[0], [line for line in lines if line.startswith("event: ")][-1]) == (": keep-alive", f"event: {last}")


async def test_an_error_after_the_200_is_an_event(slow):
    slow.answer = [Step(error="out of KV blocks", final=True)]
    client = openai.AsyncOpenAI(base_url=f"{slow.client.base_url}/v1", api_key="none", max_retries=0)
    chat_completions = await client.chat.completions.create(**slow.chat_body, stream=True)
    slow.go.set()
    with pytest.raises(openai.APIError) as raised:
        async for _ in chat_completions:
            pass
    assert raised.value.code == "engine_error"
    slow.go.clear()
    response = await client.responses.create(model="tiny", input="x", stream=True)
    slow.go.set()
    assert [event.type async for event in response][-1] == "response.failed"
    await client.close()


# -- the loop --------------------------------------------------------------------------------------------------------


async def test_the_watchdog_names_what_held_the_loop(stack, caplog, monkeypatch, tmp_path):
    """A regular expression that needs seconds stands for whatever does not give up the interpreter's lock."""

    def busy(*args) -> None:
        end = time.thread_time() + 0.4
        while time.thread_time() < end:
            sum(range(1000))

    monkeypatch.setattr(event_loop_lag, "LOG_INTERVAL", 0)
    monkeypatch.setattr(chat_completions, "validate_chat", busy)
    monkeypatch.setenv("LLMOPS_LAG_REPORT", str(tmp_path / "lag"))
    stack.say("Hello")
    assert (await stack.chat()).status_code == 200

    def told() -> list[dict]:
        """A machine whose host takes its processor away may have had to tell of that as well."""
        lines = reported(tmp_path / "lag")
        return [line for line in lines if "api/chat_completions.py" in line["stage"] and line["held"] > 0.25]

    await eventually(told)
    assert "The event loop was blocked for" in caplog.text
    held = held_by((await stack.client.get("/metrics")).text)
    assert held > 0.25
    # a report that cannot be written does not end the watch
    monkeypatch.setenv("LLMOPS_LAG_REPORT", str(tmp_path))
    for _ in range(2):
        assert (await stack.chat()).status_code == 200

    async def is_counted() -> bool:
        return held_by((await stack.client.get("/metrics")).text) > held + 0.6

    await eventually(is_counted)


def reported(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def held_by(metrics: str) -> float:
    line = next(one for one in metrics.splitlines() if one.startswith("llmops_event_loop_blocked_seconds_total"))
    return float(line.split()[1])


async def test_waiting_is_not_held(stack, monkeypatch, tmp_path):
    """A function of the gateway whose thread does not run, as when the machine is busy, has held nobody."""
    waited = []
    monkeypatch.setattr(chat_completions, "validate_chat", lambda *args: waited.append(time.sleep(0.6)))
    monkeypatch.setenv("LLMOPS_LAG_REPORT", str(tmp_path / "lag"))
    before, used = held_by((await stack.client.get("/metrics")).text), time.process_time()
    stack.say("Hello")
    assert ((await stack.chat()).status_code, waited) == (200, [None])
    # the processor's time that a host took away passes in a process as if it had worked
    used = time.process_time() - used
    assert sum(line["held"] for line in reported(tmp_path / "lag")) <= used
    assert held_by((await stack.client.get("/metrics")).text) - before < 0.25 + used
