"""Tests of the messages of a gateway while its connection is slow, breaks, or rejects.

Each request is sent once, unless its client has left.
"""

import asyncio
import json
import struct
from types import SimpleNamespace

import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from llmops.contract import RECONNECT_GRACE_PERIOD
from llmops.gateway.errors import UnavailableError, UnsupportedError
from llmops.gateway.interfaces import Capabilities, EngineRequest, ModelMetadata, TokenStream
from llmops.gateway.triton import step_stream
from llmops.gateway.triton.grpc_client import TritonClient
from llmops.gateway.triton.step_stream import StepStreamTransport
from tests.support.scripted_triton import Listening
from tests.support.waiting import eventually

CARD = ModelMetadata(
    name="tiny", target="openvino", tokenizer_dir="", max_batch_size=8, max_seq_len=64, vocab_size=100, bos_id=None,
    end_ids=(2,), pad_id=None, chat_template=False, capabilities=Capabilities(),
)  # fmt: skip


class SlowCall:
    """A ModelStreamInfer call whose writes wait for `open`, and whose answers are put in by the test."""

    def __init__(self, stops_after: int = -1) -> None:
        """Closes after so many writes."""
        self.broken = False
        self.open = asyncio.Event()
        self.open.set()
        self.stops_after = stops_after
        self.answers: asyncio.Queue = asyncio.Queue()
        self.written: list[dict[str, bytes]] = []
        self.ids: list[str] = []

    async def write(self, message: service_pb2.ModelInferRequest) -> None:
        if len(self.written) == self.stops_after:
            self.open.clear()
        await self.open.wait()
        if self.broken:
            raise asyncio.InvalidStateError
        names = [tensor.name for tensor in message.inputs]
        self.written.append(dict(zip(names, message.raw_input_contents, strict=True)))
        self.ids.append(message.id)
        if told(self.written[-1]) == "leave":
            self.answers.put_nowait(aio.EOF)

    async def read(self) -> object:
        return await self.answers.get()

    def cancel(self) -> None:
        self.broken = True
        self.answers.put_nowait(aio.EOF)
        self.open.set()

    def refuse(self, words: str) -> None:
        """Answer the last message with an error."""
        refusal = service_pb2.ModelStreamInferResponse(error_message=words)
        refusal.infer_response.id = self.ids[-1]
        self.answers.put_nowait(refusal)

    def said(self) -> list[str]:
        """subscribe, submit with the first token of each prompt, stop with its slot; in order."""
        return [told(message) for message in self.written]

    def prompts(self) -> list[list[int]]:
        """The first token of each submitted prompt, a list per message."""
        return [first_tokens(message) for message in self.written if "submissions" in message]


def first_tokens(message: dict[str, bytes]) -> list[int]:
    """Return the first token of each request, by the lengths that the objects have.

    They are read by hand: little-endian length, then as many bytes, again and again.
    """
    ids = struct.unpack(f"<{len(message['input_ids']) // 4}i", message["input_ids"])
    raw, firsts, at, start = message["submissions"], [], 0, 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        firsts.append(ids[start])
        start += json.loads(raw[at + 4 : at + 4 + size])["input_lengths"]
        at += 4 + size
    assert start == len(ids)
    return firsts


def told(message: dict[str, bytes]) -> str:
    if "submissions" in message:
        return f"submit {first_tokens(message)}"
    if "stop" in message and "slot" not in message:
        return "leave"
    return f"stop {int.from_bytes(message['slot'], 'little')}" if "stop" in message else "subscribe"


async def second_call(calls: list[SlowCall]) -> SlowCall:
    """Return the second call as soon as it has taken `subscribe` and blocks."""

    await eventually(lambda: len(calls) == 2 and not calls[1].open.is_set())
    return calls[1]


async def reconnected(calls: list[SlowCall]) -> SlowCall:
    """The second call, when all is said in it."""
    second = await second_call(calls)
    second.stops_after = -1
    second.open.set()
    await settle()
    return second


def ask(first: int) -> EngineRequest:
    return EngineRequest("x", [first, *range(first % 3)], 5)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def opened(transport: StepStreamTransport, *firsts: int) -> list[TokenStream]:
    """Streams of requests that begin with these tokens, each sent before the next one."""
    streams = []
    for first in firsts:
        streams.append(await transport.open(ask(first)))
        await settle()
    return streams


@pytest.fixture
async def streams():
    calls: list[SlowCall] = []

    def start() -> SlowCall:
        # a second connection takes `subscribe`, and the rest when the test opens it
        calls.append(SlowCall(1 if calls else -1))
        return calls[-1]

    transport = StepStreamTransport(start, "tiny-tensorrt_llm", CARD)
    yield transport, calls
    await transport.close()


async def blocked(transport: StepStreamTransport, calls: list[SlowCall]) -> TokenStream:
    """The first request was sent, and the message of the second is being written until the test lets it."""
    (first,) = await opened(transport, 10)
    calls[0].open.clear()
    await opened(transport, 11)
    return first


async def test_what_comes_while_a_message_is_written_goes_into_the_next_one(streams) -> None:
    transport, calls = streams
    await opened(transport, 10)
    calls[0].open.clear()
    await opened(transport, 11, 12, 13, 14)
    calls[0].open.set()
    await settle()
    assert calls[0].prompts() == [[10], [11], [12, 13, 14]]


async def test_a_request_that_nobody_wants_any_more_is_not_sent(streams) -> None:
    transport, calls = streams
    await blocked(transport, calls)
    early, kept = await transport.open(ask(12)), await transport.open(ask(13))
    early.cancel()
    calls[0].open.set()
    await settle()
    assert calls[0].prompts() == [[10], [11], [13]]
    kept.cancel()
    await settle()
    assert "stop" in calls[0].written[-1]


async def test_a_new_connection_gets_all_that_was_not_heard_of_in_one_message(streams) -> None:
    transport, calls = streams
    await opened(transport, 10, 11)
    calls[0].open.clear()
    await transport.open(ask(12))
    calls[0].cancel()
    second = await reconnected(calls)
    assert second.said() == ["subscribe", "submit [10, 11, 12]"]


async def test_what_waited_for_the_broken_connection_is_not_said_before_what_came_earlier(streams) -> None:
    """The engine takes a slot only if no later one was taken."""
    transport, calls = streams
    first, _ = await opened(transport, 10, 11)
    calls[0].open.clear()
    first.cancel()
    await settle()
    await opened(transport, 12)
    calls[0].cancel()
    second = await reconnected(calls)
    assert second.said() == ["subscribe", "submit [11, 12]", "stop 0"]


async def test_a_cancel_that_a_break_swallowed_is_said_again(streams) -> None:
    transport, calls = streams
    left, _ = await opened(transport, 10, 11)
    left.cancel()
    await settle()
    calls[0].cancel()
    assert "stop 0" in (await reconnected(calls)).said()


async def test_a_cancel_while_a_new_connection_is_told_of_the_request(streams) -> None:
    transport, calls = streams
    await blocked(transport, calls)
    waiting = await transport.open(ask(12))
    calls[0].cancel()
    await second_call(calls)
    waiting.cancel()
    second = await reconnected(calls)
    assert second.said()[:3] == ["subscribe", "submit [10, 11, 12]", "stop 2"]


async def test_an_unloading_triton_that_refuses_a_cancel_ends_nothing_else(streams) -> None:
    transport, calls = streams
    left, stays = await opened(transport, 10, 11)
    left.cancel()
    await settle()
    calls[0].refuse("Server is stopping, it has stopped accepting requests")
    waiting = asyncio.ensure_future(anext(stays))
    await settle()
    assert calls[0].said()[-1] == "stop 0"
    assert not waiting.done()
    waiting.cancel()


async def test_a_gateway_that_shuts_down_says_so(streams) -> None:
    transport, calls = streams
    (open_stream,) = await opened(transport, 10)
    await transport.close()
    assert calls[0].said()[-1] == "leave"
    with pytest.raises(UnavailableError, match="The gateway is shutting down"):
        await anext(open_stream)


async def test_a_refused_message_ends_its_own_requests_only(streams) -> None:
    transport, calls = streams
    first = await blocked(transport, calls)
    others = [await transport.open(ask(12)), await transport.open(ask(13))]
    calls[0].open.set()
    await settle()
    calls[0].refuse("input_ids: no")
    for stream in others:
        with pytest.raises(UnsupportedError, match="input_ids: no"):
            await asyncio.wait_for(anext(stream), 60)
    waiting = asyncio.ensure_future(anext(first))
    await settle()
    assert not waiting.done()
    waiting.cancel()


class Silent(Listening):
    """Takes subscriptions and says nothing."""

    calls = 0

    async def ModelStreamInfer(self, requests, context):
        self.calls += 1
        async for _ in requests:
            yield service_pb2.ModelStreamInferResponse()


class Nobody:
    """Watches, and does nothing with what it hears."""

    def __getattr__(self, name: str):
        return lambda *heard: None


@pytest.fixture
async def answering(monkeypatch):
    """A request to a server, of which nobody sees that time passes; how long its stream may take to come back."""
    server = Silent()
    monkeypatch.setattr(step_stream, "time", SimpleNamespace(monotonic=lambda: 0.0))
    await server.start()
    client = TritonClient(f"127.0.0.1:{server.port}")
    transport = StepStreamTransport(client.start_call, "tiny-tensorrt_llm", CARD)

    async def ask_within(grace: float) -> TokenStream:
        transport.watch(Nobody(), grace)
        stream = await transport.open(ask(10))
        await eventually(lambda: server.calls)
        return stream

    yield server, ask_within
    await transport.close()
    await client.close()
    await server.stop()


async def test_where_nobody_listens_any_more_an_answer_does_not_wait_to_go_elsewhere(answering) -> None:
    server, ask_within = answering
    stream = await ask_within(0.9 * RECONNECT_GRACE_PERIOD)
    await server.stop()
    with pytest.raises(UnavailableError, match="Triton went away"):
        await asyncio.wait_for(anext(stream), 60)


async def test_where_it_can_go_nowhere_else_it_waits_for_the_server_to_listen_again(answering) -> None:
    server, ask_within = answering
    stream = await ask_within(RECONNECT_GRACE_PERIOD)
    before = server.calls
    await server.stop()
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(3 * step_stream.RECONNECT_INTERVAL)
    await server.start()
    await eventually(lambda: server.calls > before)
    assert not waiting.done()
    waiting.cancel()
