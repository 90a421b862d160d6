"""What a gateway says while its connection is slow, breaks, or refuses: each request once, unless nobody wants it."""

from __future__ import annotations

import asyncio
import json
import struct

import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from llmops.gateway.errors import UnsupportedError
from llmops.gateway.messages import Capabilities, EngineRequest, ModelCard
from llmops.gateway.triton.step_stream import StepStreams

CARD = ModelCard(
    name="tiny",
    target="openvino",
    tokenizer_dir="",
    max_batch_size=8,
    max_seq_len=64,
    vocab_size=100,
    bos_id=None,
    end_ids=(2,),
    pad_id=None,
    chat_template=False,
    capabilities=Capabilities(),
)


class SlowCall:
    """A ModelStreamInfer call whose writes wait for `open`, and whose answers are put in by the test."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.answers: asyncio.Queue = asyncio.Queue()
        self.written: list[dict[str, bytes]] = []
        self.ids: list[str] = []

    async def write(self, message: service_pb2.ModelInferRequest) -> None:
        await self.open.wait()
        names = [tensor.name for tensor in message.inputs]
        self.written.append(dict(zip(names, message.raw_input_contents, strict=True)))
        self.ids.append(message.id)

    async def read(self) -> object:
        return await self.answers.get()

    def cancel(self) -> None:
        self.answers.put_nowait(aio.EOF)

    def prompts(self) -> list[list[int]]:
        """The first token of each submitted prompt, a list per message."""
        return [first_tokens(message) for message in self.written if "submissions" in message]


def first_tokens(message: dict[str, bytes]) -> list[int]:
    """By the lengths that the objects tell, read by hand: little-endian length, then as many bytes, again and again."""
    ids, raw, firsts = (
        struct.unpack(f"<{len(message['input_ids']) // 4}i", message["input_ids"]),
        message["submissions"],
        [],
    )
    at = start = 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        firsts.append(ids[start])
        start += json.loads(raw[at + 4 : at + 4 + size])["input_lengths"]
        at += 4 + size
    assert start == len(ids)
    return firsts


def ask(first: int) -> EngineRequest:
    return EngineRequest("x", [first, *range(first % 3)], 5)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def streams():
    calls: list[SlowCall] = []

    def start() -> SlowCall:
        calls.append(SlowCall())
        return calls[-1]

    transport = StepStreams(start, "tiny-tensorrt_llm", CARD)
    yield transport, calls
    await transport.close()


async def test_what_comes_while_a_message_is_written_goes_into_the_next_one(streams) -> None:
    transport, calls = streams
    await transport.open(ask(10))
    await settle()
    calls[0].open.clear()
    for first in (11, 12, 13, 14):
        await transport.open(ask(first))
        await settle()
    calls[0].open.set()
    await settle()
    assert calls[0].prompts() == [[10], [11], [12, 13, 14]]


async def test_a_request_that_nobody_wants_any_more_is_not_sent(streams) -> None:
    transport, calls = streams
    await transport.open(ask(10))
    await settle()
    calls[0].open.clear()
    await transport.open(ask(11))
    await settle()
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
    for first in (10, 11):
        await transport.open(ask(first))
        await settle()
    calls[0].open.clear()
    await transport.open(ask(12))
    calls[0].answers.put_nowait(aio.EOF)
    calls[0].open.set()
    for _ in range(100):
        await settle()
        if len(calls) == 2 and calls[1].prompts():
            break
    assert "resume_from" in calls[1].written[0]
    assert calls[1].prompts()[0] == [10, 11, 12]


async def test_a_refused_message_ends_its_own_requests_only(streams) -> None:
    transport, calls = streams
    first = await transport.open(ask(10))
    await settle()
    calls[0].open.clear()
    await transport.open(ask(11))
    await settle()
    others = [await transport.open(ask(12)), await transport.open(ask(13))]
    calls[0].open.set()
    await settle()
    refusal = service_pb2.ModelStreamInferResponse(error_message="input_ids: no")
    refusal.infer_response.id = calls[0].ids[-1]
    calls[0].answers.put_nowait(refusal)
    for stream in others:
        with pytest.raises(UnsupportedError, match="input_ids: no"):
            await asyncio.wait_for(anext(stream), 5)
    waiting = asyncio.ensure_future(anext(first))
    await settle()
    assert not waiting.done()
    waiting.cancel()
