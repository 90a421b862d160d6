"""An encoder's batches: what Triton has of them, whose turn is next, and how many may wait."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmops.gateway.api.moderations import text_embedder
from llmops.gateway.errors import EngineError, UnavailableError
from llmops.gateway.interfaces import Caller
from llmops.gateway.ratelimit.slots import FairSlots
from llmops.gateway.safety.policy import Safety
from llmops.gateway.safety.services import ClassifierFilter, ClassifierHead
from llmops.gateway.settings import SafetySettings
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.gateway.triton.encoder_client import BATCH_TOKENS, TritonEncoder
from llmops.gateway.triton.model_metadata import EncoderMetadata

BATCH = 4


class HeldTriton:
    """Answers a batch, with each row's first id as its vector, when it is told to."""

    def __init__(self) -> None:
        self.came = []
        self._held: list[asyncio.Future[None]] = []

    async def infer(self, request):
        ids = np.frombuffer(request.raw_input_contents[0], np.int32).reshape(request.inputs[0].shape)[:, 0]
        self.came.append(ids.tolist())
        held = asyncio.get_running_loop().create_future()
        self._held.append(held)
        await held
        return service_pb2.ModelInferResponse(raw_output_contents=[ids.astype(np.float32).tobytes()])

    async def answer(self, error: Exception | None = None) -> None:
        """The batch that came first of those that are there, and whatever that makes come."""
        waiting = next(one for one in self._held if not one.done())
        waiting.set_exception(error) if error else waiting.set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def encoder(triton: HeldTriton, queued: int = 1000) -> TritonEncoder:
    card = EncoderMetadata("tiny", "openvino", "", BATCH, BATCH_TOKENS, 300, 1)
    return TritonEncoder(triton.infer, "tiny-embedding", card, queued)


async def asked(made: TritonEncoder, first: int, rows: int, caller: str) -> asyncio.Task:
    return await begun(made.run([[first + at] for at in range(rows)], caller=caller))


async def begun(run) -> asyncio.Task:
    """A request that has sent all that it may send before an answer."""
    task = asyncio.ensure_future(run)
    await settle()
    return task


async def answered(triton: HeldTriton, *tasks: asyncio.Task) -> None:
    """Answer batches until these requests are done."""
    while not all(task.done() for task in tasks):
        await triton.answer()


async def test_triton_has_two_batches_and_callers_take_turns_for_the_next():
    triton = HeldTriton()
    made = encoder(triton)
    large = await asked(made, 0, 10 * BATCH, "a")
    assert len(triton.came) == 2, "the one it runs and the next"
    small = await asked(made, 200, 1, "b")
    await answered(triton, small)
    assert triton.came.index([200]) == 3, "the one turn of the large request that was before it"
    await answered(triton, large)
    assert ((await large)[:, 0].tolist(), (await small)[:, 0].tolist()) == ([*range(10 * BATCH)], [200])


async def test_requests_of_one_caller_take_turns():
    triton = HeldTriton()
    made = encoder(triton)
    large = [await asked(made, 0, 10 * BATCH, "a/key") for _ in range(2)]
    await answered(triton, await asked(made, 200, 1, "a/key"))
    assert triton.came.index([200]) <= 5, "two batches of each large request, and one that was next"
    for one in large:
        one.cancel()


async def test_long_texts_fill_a_batch_by_their_tokens():
    """Before, a text waited for three batches of any length: for 15 s behind texts of 240 tokens."""
    triton = HeldTriton()
    made = encoder(triton)
    large = await begun(made.run([[at] * (BATCH_TOKENS // 2) for at in range(2 * BATCH)], caller="a"))
    assert triton.came == [[0, 1], [2, 3]]
    await answered(triton, large)
    assert (await large)[:, 0].tolist() == [*range(2 * BATCH)]
    longest = await begun(made.run([[1] * 2 * BATCH_TOKENS, [2] * BATCH_TOKENS, [3], [4]]))
    assert triton.came[-2:] == [[1], [2]], "one text longer than a batch, and the texts behind wait for its slots"
    await answered(triton, longest)
    assert triton.came[-1] == [3, 4]


def embedder(made):
    model = SimpleNamespace(
        card=SimpleNamespace(max_seq_len=8),
        tokenizer=SimpleNamespace(
            is_slow=False,
            frame=SimpleNamespace(size=0, ids=lambda row: row),
            encode_beginning=lambda text, room, add_special_tokens: [int(text[:3])],
        ),
        embed=lambda rows, caller="": made.run(rows, caller=caller),
    )
    return text_embedder(SimpleNamespace(get=lambda name, caller: model))


@pytest.mark.parametrize("judge", [lambda *one: one[0].check_prompt([one[1]], one[2]), Safety.moderate])
async def test_long_texts_of_a_tenant_hold_up_no_other_tenant_s_before_a_classifier(judge):
    """Before, a text waited until one of 64 had been read, whose passages took turns: 2,307 batches."""
    triton = HeldTriton()
    head = ClassifierHead("m", {"x": [0.0, -5.0]}, {})
    filter_ = ClassifierFilter("c", head, embedder(encoder(triton, queued=16_384)))
    settings = SafetySettings(filters={"c": {"kind": "model", "head": "x"}}, policy={"prompt": ["c"]})
    safety = Safety(settings, {"c": filter_}, GatewayMetrics())
    long = [await begun(judge(safety, "1" * 100_000, Caller(share="evil/1"))) for _ in range(70)]
    await answered(triton, await begun(judge(safety, "200", Caller(share="other/1"))))
    assert triton.came.index([200]) < 40
    for one in long:
        one.cancel()


async def test_small_requests_are_all_there_for_triton_to_put_together():
    triton = HeldTriton()
    made = encoder(triton)
    many = [await asked(made, at, 1, "a") for at in range(2 * BATCH + 1)]
    assert len(triton.came) == 2 * BATCH
    await answered(triton, *many)
    assert [(await one)[0, 0] for one in many] == [*range(2 * BATCH + 1)]


async def test_no_client_fills_the_queue():
    triton = HeldTriton()
    made = encoder(triton, queued=16)
    # 2 * BATCH are anybody's; of the 16 behind them one client has half
    first = [await asked(made, 0, BATCH, "a") for _ in range(4)]
    with pytest.raises(UnavailableError, match="Too many inputs wait for the model 'tiny'") as refused:
        await (await asked(made, 0, 1, "a"))
    assert (refused.value.code, refused.value.retry_after) == ("overloaded", 1)
    await answered(triton, *first, await asked(made, 100, BATCH, "b"))
    alone = await asked(made, 0, 100, "a")
    await answered(triton, alone)
    assert len(await alone) == 100, "a request alone is never too long"


async def test_what_a_failed_request_still_had_to_send_is_not_sent():
    triton = HeldTriton()
    made = encoder(triton)
    broken = await asked(made, 0, 10 * BATCH, "a")
    await triton.answer(EngineError("it broke"))
    with pytest.raises(EngineError):
        await broken
    came = len(triton.came)
    await answered(triton, await asked(made, 0, 2 * BATCH, "a"))
    assert len(triton.came) == came + 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), max_size=30))
async def test_places_are_never_more_than_there_are_and_all_come_back(steps):
    places, held = FairSlots(4), []
    waiting: list[tuple[asyncio.Task, int]] = []
    for name, count, leave in steps:
        waiting.append((asyncio.ensure_future(places.enter(name, count)), count))
        await asyncio.sleep(0)
        held += [count for task, count in waiting if task.done()]
        waiting = [(task, count) for task, count in waiting if not task.done()]
        assert sum(held) <= 4
        if leave and held:
            places.leave(held.pop())
        elif leave and waiting:
            waiting.pop()[0].cancel()
        await asyncio.sleep(0)
    for task, _ in waiting:
        task.cancel()
    await asyncio.sleep(0)
    held += [count for task, count in waiting if task.done() and not task.cancelled()]
    for count in held:
        places.leave(count)
    await asyncio.wait_for(places.enter("d", 4), 60)


async def test_places_that_are_added_are_somebodys_at_once_and_those_that_go_are_waited_for():
    places = FairSlots(2)
    await places.enter("a", 2)
    waits = [asyncio.ensure_future(places.enter(name)) for name in "bcd"]
    places.resize(4)
    await settle()
    assert [one.done() for one in waits] == [True, True, False]
    places.resize(1)
    for expected in (False, False, False, True):
        places.leave()
        await settle()
        assert waits[2].done() == expected
