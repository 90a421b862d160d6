"""Engines and providers that send anything cost no other model, and no caller more than it asked for."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import struct
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvloop
from tritonclient.grpc import service_pb2

from llmops.errors import InputError
from llmops.gateway.errors import UnavailableError
from llmops.gateway.generation.answer import StreamWatchdog
from llmops.gateway.generation.choice import LOGPROB_BYTES, Choice, LogprobBuffer
from llmops.gateway.generation.provider_chat import ProviderChoice
from llmops.gateway.interfaces import EngineRequest, TokenBatch, Usage
from llmops.gateway.ratelimit.buckets import Limit, Settlement
from llmops.gateway.ratelimit.redis import RedisLimiter
from llmops.gateway.routing import providers
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from llmops.gateway.settings import ProviderSettings
from llmops.gateway.triton.model_metadata import parse_model_metadata
from llmops.gateway.triton.request_writer import RequestWriter
from llmops.gateway.triton.step_stream import StepStreamTransport, StepSubscription
from tests.attacks.harness import MIB
from tests.steps.test_submissions import CARD
from tests.support.gateway_stack import become, in_front_of, running
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.waiting import eventually


def endless(*steps: Step) -> Any:
    async def answer(tensors: dict) -> AsyncIterator[Step]:
        for step in itertools.cycle(steps):
            yield step
            await asyncio.sleep(0)

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [[Step((5,))], [Step((5,) * 60_000)], [Step((5,)), Step(final=True)]])
async def test_an_engine_that_does_not_stop_is_stopped(card, tokenizer, steps, stream):
    """Before the fix, answers went on beyond `max_tokens` for `timeouts.total`, and were billed."""
    async with running(card, tokenizer) as stack:
        stack.triton.script = endless(*steps)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "stream": stream}
        answer = await stack.client.post("/v1/completions", json=body, timeout=20)
        assert answer.status_code == 200
        assert len(answer.content) < 4000
        if not stream:
            assert answer.json()["usage"]["completion_tokens"] <= 8
        await stack.idle()


@pytest.mark.parametrize("step", [Step((-1,)), Step((5,), sequence=9), Step((5,), sequence=-7)])
async def test_tokens_that_cannot_be_read_are_one_line_in_the_log(card, tokenizer, step, caplog):
    """Before the fix, each request wrote a traceback of 2 KB."""
    async with running(card, tokenizer) as stack:
        stack.triton.script = lambda tensors: [step, Step(final=True)]
        caplog.clear()
        assert (await stack.chat()).json()["error"]["code"] == "engine_error"
    assert [one.exc_info for one in caplog.records if one.levelname == "ERROR"] == [None]


@pytest.mark.parametrize("step", [Step((-1,)), Step((10**6,)), Step((5,), sequence=9), Step((5,), sequence=-7)])
async def test_an_engine_whose_tokens_cannot_be_right_is_left_for_another(card, step):
    """Before the fix, the request failed with 500, or its answer was empty, beside a replica that was ready."""
    wrong = ScriptedTriton(card, lambda tensors: [step, Step(final=True)])
    right = ScriptedTriton(card, lambda tensors: [Step((5, 6)), Step(final=True)])
    async with in_front_of(wrong, right) as (client, _):
        await become(client, "ready", "ready")
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 8}
        for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(4))):
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
        assert wrong.requests
        await become(client, "suspect", "ready")


async def test_log_probabilities_are_numbers_of_json(card, tokenizer):
    """Before the fix, NaN and -Infinity made the answer no JSON; a grammar excludes tokens with -inf."""
    async with running(card, tokenizer) as stack:
        stack.steps(Step((5, 6, 7), logprobs=(math.nan, -math.inf, math.inf)), Step(final=True))
        answer = await stack.chat(logprobs=True)
    content = json.loads(answer.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [-9999.0, -9999.0, 0.0]


async def test_log_probabilities_of_a_whole_answer_are_bounded():
    """Before the fix, 20 requests with 20 alternatives took 375 MB in 20 s, and more without end."""
    choice = Choice(0, PlainDetokenizer(), max_tokens=10**6, logprobs=LogprobBuffer(lambda token: b"x", 100))
    tops = [[(token, -1.0) for token in range(19)]]
    while not choice.done:
        choice.feed(TokenBatch(0, [5], [-1.0], tops=tops))
    assert (choice.completion_tokens, choice.finish_reason) == (5, "length")


async def test_log_probabilities_of_several_answers_share_the_memory(card, tokenizer):
    """Before the fix, 20 answers took 703 MB at their peak: each was bounded, all together were not."""
    piece = Step((5,) * 1000, logprobs=(-1.0,) * 1000)
    limits = {"held_bytes": 2 * 1000 * LOGPROB_BYTES}
    async with running({**card, "max_seq_len": 100_000}, tokenizer, limits=limits) as stack:
        stack.steps(piece, Step(hang=True))
        first = asyncio.create_task(stack.chat(logprobs=True))
        await eventually(lambda: stack.triton.active == 1)
        await asyncio.sleep(0.2)
        stack.steps(*[piece] * 5, Step(final=True))
        choice = (await stack.chat(logprobs=True)).json()["choices"][0]
        first.cancel()
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["content"]) < 3000


class PlainDetokenizer:
    """Each token is a letter."""

    def feed(self, tokens: list[int]) -> str:
        return "x" * len(tokens)

    def flush(self) -> str:
        return ""


async def test_a_provider_that_does_not_stop_is_stopped():
    """Before the fix, an answer of 50 tokens had 8 MB after 20 s."""
    choice = ProviderChoice(0, 50, None)
    piece = providers.ProviderBatch.of(providers.ChunkChoice(delta=providers.ProviderDelta(content="word " * 20)))
    text = "".join(choice.feed(piece) for _ in range(9000))
    assert (choice.done, choice.finish_reason) == (True, "length")
    assert len(text) < 20_000


class UnreadableCall:
    """A step stream whose first message has no tokens."""

    async def write(self, message: Any) -> None:
        return

    async def read(self) -> Any:
        answer = service_pb2.ModelStreamInferResponse()
        answer.infer_response.outputs.add(name="step_index", datatype="INT64", shape=[1])
        answer.infer_response.raw_output_contents.append(struct.pack("<q", 1))
        return answer

    def cancel(self) -> None:
        return


async def test_an_engine_that_cannot_be_read_is_not_asked_again_at_once():
    """Before the fix, four attempts a second wrote three lines each into the log."""
    start_call, seen = Mock(side_effect=UnreadableCall), Mock()
    transport = StepStreamTransport(start_call, "tiny-tensorrt_llm", CARD)
    transport.watch(SimpleNamespace(on_disconnect=seen), 1.0)
    await asyncio.sleep(0.8)
    await transport.close()
    assert start_call.call_count == seen.call_count == 1


def message_with(**tensors: bytes) -> Any:
    """A message of a step stream with these tensors, and empty ones that each step has."""
    given = {"step_index": struct.pack("<q", 1), "step_entries": b"", "step_tokens": b"", **tensors}
    answer = service_pb2.ModelInferResponse()
    for name, value in given.items():
        answer.outputs.add(name=name)
        answer.raw_output_contents.append(value)
    return answer


def step(entry: tuple[int, int, int, int], *tokens: int, index: int = 1) -> dict[str, bytes]:
    entries, ids = struct.pack("<4i", *entry), struct.pack(f"<{len(tokens)}i", *tokens)
    return {"step_index": struct.pack("<q", index), "step_entries": entries, "step_tokens": ids}


#: Steps with one impossible value: the token, then the entry's sequence, slot or count, then the index of the step.
WRONG_STEPS = [step((0, 0, 1, 16), token) for token in (-5, CARD.vocab_size)]
WRONG_STEPS += [step((0, sequence, 1, 16), 5) for sequence in (1, -1)]
WRONG_STEPS += [step((slot, 0, 1, 16), 5) for slot in (1, -1)]
WRONG_STEPS += [step((0, 0, count, 16), 5) for count in (2**31 - 1, 0)]
WRONG_STEPS += [step((0, 0, 1, 16), 5, index=2)]


@pytest.mark.parametrize("tensors", WRONG_STEPS)
async def test_a_step_that_cannot_be_right_ends_the_stream_as_a_broken_one(tensors: dict[str, bytes]) -> None:
    """Before the fix, requests failed with 500, or waited in vain, and the engine got the next ones at once."""
    call, seen = UnreadableCall(), []

    async def read() -> Any:
        await asyncio.sleep(0.05)
        return service_pb2.ModelStreamInferResponse(infer_response=message_with(**tensors))

    call.read = read  # type: ignore[method-assign]
    transport = StepStreamTransport(lambda: call, "tiny-tensorrt_llm", CARD)
    transport.watch(SimpleNamespace(on_disconnect=seen.append), 1.0)
    stream = await transport.open(EngineRequest("x", [1, 2], 8))
    with pytest.raises(UnavailableError) as raised:
        await asyncio.wait_for(anext(stream), 5)
    await asyncio.sleep(0.5)
    await transport.close()
    assert seen == [raised.value], "it has the next requests only after a pause"


@pytest.mark.parametrize(
    "tensors",
    [
        {"step_top_counts": bytes(32 * MIB), "step_top_ids": b"", "step_top_log_probs": b""},
        {"step_errors": bytes(32 * MIB)},
        {"step_model_identity": bytes(32 * MIB)},
        {"step_kv_events": bytes(32 * MIB), "step_kv_hashes": b""},
        {"step_kv_events": struct.pack("<2i", 1, 4 * MIB), "step_kv_hashes": os.urandom(32 * MIB)},
        {"step_kv_events": struct.pack("<4i", 1, 60_000, 1, -60_000) * 10_000, "step_kv_hashes": os.urandom(480_000)},
        {"step_entries": struct.pack("<8i", 7, 0, 60_000, 0, 7, 0, -60_000, 0) * 8000, "step_tokens": bytes(240_000)},
    ],
    ids=["tops", "errors", "identity", "events", "blocks", "negative events", "negative counts"],
)
async def test_a_message_of_one_engine_leaves_the_event_loop_to_others(tensors: dict[str, bytes]) -> None:
    """Before the fix, 32 MiB held the gateway for 2 to 19 s, and negative counts held it for as long as they liked."""
    index = PrefixIndex()
    observer = SimpleNamespace(on_cache_event=lambda _, names: index.store("r", names), on_identity=lambda _: None)
    subscription = StepSubscription(UnreadableCall, RequestWriter.of("tiny-tensorrt_llm", CARD), observer)
    subscription._streams[7] = SimpleNamespace(push=lambda _: None)
    began = time.process_time()
    with contextlib.suppress(ValueError):
        await subscription._step(message_with(**tensors))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": "' + "x" * 2**20 + '"}'], ids=["deep", "long"])
def test_a_model_that_describes_itself_with_anything_is_one_sentence(text: str) -> None:
    with pytest.raises(InputError):
        parse_model_metadata(text)


# -- timers: uvloop, which serves, has another handle for a timer that is due at once ----------------------------------


def test_the_watchdog_of_an_answer_ends_it_at_any_remaining_time():
    """Before the fix, a watchdog with less than 0.5 ms left raised, and the answer never timed out."""

    async def main() -> None:
        stream = SimpleNamespace(is_failing_over=False, cancel=lambda: None)
        timeouts = SimpleNamespace(first_token=0.0001, idle=1.0, total=1.0)
        watchdog = StreamWatchdog(stream, SimpleNamespace(last=0.0), timeouts)  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert watchdog.expired is not None

    uvloop.run(main())


def test_a_gateway_that_gives_a_sign_of_life_settles():
    async def main() -> None:
        limiter = RedisLimiter("redis://127.0.0.1:9")
        limiter.up.set()
        limiter.beat()
        limiter.settle([Limit("a", places=1)], Settlement(places=-1))
        await limiter.close()

    uvloop.run(main())


def test_a_provider_reports_no_more_tokens_than_a_request_can_have_caused() -> None:
    """Before the fix, $40 were billed for two answers of at most 20 tokens."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    counted = providers.bounded_usage(Usage(10**6, 10**6, 10**6, 10**6), body, 10**6)
    assert counted.completion_tokens == counted.reasoning_tokens == 20
    assert counted.prompt_tokens == counted.cached_tokens < 1200
    assert providers.bounded_usage(Usage(30, 12, 4, None), body, 10**6) == Usage(30, 12, 4, None)


async def test_only_counts_of_the_whole_answer_replace_the_estimate() -> None:
    """Before the fix, counts of 0 in the first event made the rest of an answer free of charge."""
    none, whole = ({"prompt_tokens": count, "completion_tokens": count} for count in (0, 7))
    text, end = {"choices": [{"delta": {"content": "word"}}]}, {"choices": [{"finish_reason": "stop"}]}

    async def counted(*events: dict[str, Any]) -> Usage | None:
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        headers = {"content-type": "text/event-stream"}
        answer = httpx.Response(200, headers=headers, stream=httpx.ByteStream(body.encode()))
        provider = providers.Provider("cloud", ProviderSettings(url="https://cloud.example"), 1.0)
        provider.client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: answer))
        stream = provider.model("big").open({}, "acme")
        with contextlib.suppress(providers.ProviderError):
            async for _ in stream:
                pass
        return stream.usage

    assert await counted(text | {"usage": none}, text) is None
    assert await counted(text | {"usage": none}, text, end) is None
    assert await counted(text, end, {"usage": whole}) == Usage(7, 7, 0, None)
    later = [one | {"usage": whole} for one in (text, end)]
    assert await counted(text | {"usage": none}, *later) == Usage(7, 7, 0, None)


class SilentTriton(ScriptedTriton):
    """A server that, once told, takes the calls of these methods and says nothing."""

    silent: frozenset[str] = frozenset()

    async def ServerReady(self, request, context):
        await self._hang("ServerReady")
        return await super().ServerReady(request, context)

    async def ModelReady(self, request, context):
        await self._hang("ModelReady")
        return await super().ModelReady(request, context)

    async def _hang(self, method: str) -> None:
        if method in self.silent:
            await asyncio.sleep(30)


@pytest.mark.parametrize("method", ["ServerReady", "ModelReady"])
async def test_a_server_that_says_nothing_does_not_make_its_gateways_unready(card, method):
    """Probes gave up while the gateway waited 5 s for each model of one server of two."""
    good, silent = (kind(card, lambda tensors: [Step(final=True)]) for kind in (ScriptedTriton, SilentTriton))
    async with in_front_of(good, silent, refresh="1h") as (client, _):
        silent.silent = frozenset([method])
        assert (await client.get("/health/ready", timeout=4)).status_code == 200
