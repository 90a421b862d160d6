"""Tests of requests that no engine state counts yet.

They are neither forgotten too early nor counted for ever.
"""

import asyncio
import json
import struct
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

from grpc import aio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from llmops.contract import FIRST_OF_SLOT, LAST_OF_SEQUENCE, LAST_OF_SLOT
from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import EngineRequest, SchedulingParams, TokenStream
from llmops.gateway.routing.admission.admission_controller import AdmissionController, AdmissionLimits
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.triton.step_stream import StepStreamTransport
from tests.fleet.views import settled
from tests.steps.test_submissions import CARD
from tests.support.waiting import stop_tasks

PLACES = 4


class Engine:
    """A connection with a batch of four whose ends are read when the test says so, as StepStreamTransport calls it."""

    def __init__(self) -> None:
        self.sent: deque[dict[str, bytes]] = deque()
        self.said: deque[service_pb2.ModelStreamInferResponse] = deque()
        self.heard: asyncio.Queue = asyncio.Queue()
        self.slots: list[int] = []
        self.next_slot = self.steps = 0

    # -- the gateway's end --------------------------------------------------------------------------------------------
    async def write(self, message: service_pb2.ModelInferRequest) -> None:
        names = [tensor.name for tensor in message.inputs]
        self.sent.append(dict(zip(names, message.raw_input_contents, strict=True)))
        if "stop" in names and "slot" not in names:
            # the test lets it leave
            self.cancel()

    async def read(self) -> object:
        return await self.heard.get()

    def cancel(self) -> None:
        self.heard.put_nowait(aio.EOF)

    # -- the engine's end ---------------------------------------------------------------------------------------------
    @property
    def owed(self) -> int:
        """Requests that it has, or that are on their way to it."""
        stopped = [stop_of(message) for message in self.sent if "stop" in message]
        coming = [slot for message in self.sent for slot in slots_of(message)]
        return sum(slot not in stopped for slot in [*self.slots, *coming])

    def take(self) -> None:
        """A message of the gateway."""
        message = self.sent.popleft() if self.sent else {}
        if "stop" in message and stop_of(message) in self.slots:
            self.end(stop_of(message))
        for slot in slots_of(message):
            self.slots.append(slot)
            self.next_slot = slot + 1

    def end(self, slot: int | None = None) -> None:
        """An answer of one token, the first if it is not said which."""
        if self.slots:
            slot = self.slots[0] if slot is None else slot
            self.slots.remove(slot)
            self.steps += 1
            entry = struct.pack("<4i", slot, 0, 1, FIRST_OF_SLOT | LAST_OF_SEQUENCE | LAST_OF_SLOT)
            self.say(step_index=struct.pack("<q", self.steps), step_entries=entry, step_tokens=struct.pack("<i", 7))

    def say(self, **outputs: bytes) -> None:
        """Its state, with a step or without."""
        numbers = [len(self.slots), 0, 0, 900, 1000, 4, 0, 20_000, 1, 0, 0, self.next_slot]
        response = service_pb2.ModelStreamInferResponse()
        for name, raw in {**outputs, "step_state": struct.pack("<12i", *numbers)}.items():
            response.infer_response.outputs.add(name=name)
            response.infer_response.raw_output_contents.append(raw)
        self.said.append(response)

    def deliver(self) -> None:
        """One message reaches the gateway."""
        if self.said:
            self.heard.put_nowait(self.said.popleft())


def stop_of(message: dict[str, bytes]) -> int:
    return int.from_bytes(message["slot"], "little")


def slots_of(message: dict[str, bytes]) -> list[int]:
    raw, slots, at = message.get("submissions", b""), [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        slots.append(json.loads(raw[at + 4 : at + 4 + size])["slot"])
        at += 4 + size
    return slots


class Gateway:
    """A fleet of one replica, with a gate."""

    def __init__(self, engine: Engine, places: int = PLACES) -> None:
        card = replace(CARD, max_batch_size=places, state=True)
        policy = LeastCostPolicy(PrefixIndex())
        tiers = TieredQueue([PriorityTier("standard", max_wait=600.0)], default="standard")
        self.fleet = ReplicaPool("tiny", policy, controller=AdmissionController(tiers, policy, AdmissionLimits()))
        self.transport = StepStreamTransport(lambda: engine, "tiny-tensorrt_llm", card)
        model = SimpleNamespace(name="tiny", card=card, engine=self.transport)
        self.replica = Replica("r", model, policy, self.fleet.update)
        self.replica.health.set_loaded(True)
        self.fleet.replicas = {"r": self.replica}
        self.asked: list[asyncio.Task[None]] = []
        self.streams: list[TokenStream] = []

    async def __aenter__(self) -> "Gateway":
        self.replica.start(0.3)
        await settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_tasks(*self.asked)
        self.replica.stop()
        await self.transport.close()

    def ask(self) -> None:
        self.asked.append(asyncio.create_task(self._answered()))

    def leave(self) -> None:
        """The client of the answer that was begun last leaves."""
        if self.streams:
            self.streams.pop().cancel()

    async def _answered(self) -> None:
        turn = SchedulingParams("tenant", "standard", asyncio.get_running_loop().time())
        # eight blocks, which the gateway takes for cached as soon as they are sent
        stream = await self.fleet.open(EngineRequest("x", list(range(32)), 8, turn=turn))
        self.streams.append(stream)
        async for _ in stream:
            pass
        if stream in self.streams:
            self.streams.remove(stream)


async def play(actions: list[str]) -> None:
    engine = Engine()
    async with Gateway(engine) as gateway:
        engine.say()
        engine.deliver()
        await settled()
        for action in actions:
            getattr(gateway if action in ("ask", "leave") else engine, action)()
            await settled()
            assert engine.owed <= PLACES
        while engine.sent or engine.slots or engine.said:
            for action in (engine.take, engine.end, engine.deliver):
                action()
            await settled()
        view = gateway.replica.view
        assert all(task.done() for task in gateway.asked)
        assert (view.in_flight, view.in_flight_tokens, gateway.replica.open_streams) == (0, 0, 0)


HELD_UP = ["say", "say", "say", *["ask"] * 4, "deliver", "deliver", "deliver", "ask"]


@settings(max_examples=30, deadline=None)
@example(HELD_UP)
@given(st.lists(st.sampled_from(["ask", "leave", "take", "end", "say", "deliver"]), max_size=40))
def test_an_engine_gets_no_more_than_its_batch_however_late_its_word_comes(actions: list[str]) -> None:
    asyncio.run(play(actions))


async def test_what_left_before_the_engine_said_a_word_of_it_is_counted_no_longer() -> None:
    engine = Engine()
    async with Gateway(engine) as gateway:
        engine.say()
        engine.deliver()
        await settled()
        for _ in range(3):
            gateway.ask()
        await settled()
        view = gateway.replica.view
        # the second and the third found the prompt of the first cached
        assert (view.in_flight, view.in_flight_tokens) == (3, 32 + 1 + 1)
        gateway.streams.pop(0).cancel()
        await settled()
        assert (view.in_flight, view.in_flight_tokens) == (2, 2)
        gateway.leave()
        await settled()
        assert (view.in_flight, view.in_flight_tokens) == (1, 1)


async def test_an_engine_that_says_nothing_of_a_request_and_that_no_prompt_waits_is_as_good_as_silent() -> None:
    """Before the fix, its requests waited for `timeouts.first_token`, and it got the next ones."""
    engine = Engine()
    async with Gateway(engine) as gateway:
        for action in (engine.say, gateway.ask, gateway.ask, *[engine.take] * 3, engine.end):
            action()
            engine.deliver()
            await settled()
        answered, unanswered = gateway.asked
        for waiting, checks, ends in ((32, 100, False), (0, 19, False), (0, 1, True)):
            gateway.replica.view.waiting_tokens = waiting
            for _ in range(checks):
                gateway.replica.check_unanswered()
            await settled()
            assert (answered.done(), unanswered.done()) == (True, ends)
        assert isinstance(unanswered.exception(), UnavailableError)
        assert gateway.replica.view.state == "suspect"
