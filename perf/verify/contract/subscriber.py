"""A subscriber of a step stream for checks, which sends and returns messages unchanged."""

import asyncio
import struct
import uuid
from array import array
from dataclasses import dataclass
from typing import Any, Self

from grpc import aio

from llmops import contract
from llmops.contract import ERROR_FLAG, FINAL_RESPONSE_PARAMETER, LAST_OF_SLOT
from llmops.gateway.interfaces import EngineRequest, SamplingParams
from llmops.gateway.triton.engine_observer import decode_strings
from llmops.gateway.triton.grpc_client import WRITE_ERRORS
from llmops.gateway.triton.request_writer import RequestWriter
from llmops.gateway.triton.step_writer import StepWriter
from llmops.perf.verify.engine_context import EngineContext
from llmops.perf.verify.findings import WrongError
from llmops.perf.verify.probe import PATIENCE


@dataclass(frozen=True)
class StepEntry:
    slot: int
    sequence: int
    tokens: list[int]
    flags: int
    error: str = ""


@dataclass(frozen=True)
class ReceivedStep:
    """A message of a step stream.

    Attributes:
        entries: The entries of the message.
        index: The index of the step, or 0 for the end of the subscription.
        error: Triton's error at the end, or an empty text.
        stored: Number of KV-cache blocks that the message reports as new.
    """

    index: int
    entries: list[StepEntry]
    error: str = ""
    stored: int = 0


class Subscriber:
    """An async context manager of a subscription. Its exit breaks the stream."""

    def __init__(self, engine: EngineContext, watch: bool = False) -> None:
        """Create a subscriber that is not connected yet.

        Args:
            engine: The engine model to subscribe to.
            watch: True to subscribe to the engine's state and cache events too.
        """
        self._engine, self._watch = engine, watch
        self._name = f"verify-{uuid.uuid4().hex}"
        requests = RequestWriter(
            engine.probe.model, vocab_size=engine.metadata.vocab_size, pad_id=engine.metadata.pad_id
        )
        self._writer = StepWriter(requests, self._name)
        self._steps: asyncio.Queue[ReceivedStep] = asyncio.Queue()
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.leave()

    async def connect(self, resume_from: int = 0) -> None:
        self._call = self._engine.probe.client.start_call()
        self._reader = asyncio.create_task(self._read(self._call))
        await self._call.write(self._writer.subscribe(resume_from, self._watch))

    async def leave(self) -> None:
        """Break the stream as a crash of the gateway would. Unread messages are lost."""
        self._call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        while not self._steps.empty():
            self._steps.get_nowait()

    async def submit(self, *requests: tuple[int, int]) -> None:
        """Submit greedy requests with the common prompt in one message, as (slot, new tokens) each."""
        submissions = [
            self._writer.submission(
                EngineRequest("", self._engine.prompt, new, SamplingParams(temperature=0.0)), slot
            )
            for slot, new in requests
        ]  # fmt: skip
        await self._call.write(self._writer.submit(submissions))

    async def acknowledge(self, step: int) -> None:
        await self._call.write(self._writer.acknowledge(step))

    async def cancel(self, slot: int) -> None:
        await self._call.write(self._writer.cancel(slot))

    async def next(self, patience: float = PATIENCE) -> ReceivedStep | None:
        """Return the next message, or None after a timeout."""
        try:
            return await asyncio.wait_for(self._steps.get(), patience)
        except TimeoutError:
            return None

    async def step(self) -> ReceivedStep:
        """Return the next step. Raise WrongError if the stream ended before a step came."""
        step = await self.next()
        if step is None or not step.index:
            raise WrongError("the step stream ended before a token came; see Triton's log")
        return step

    async def stored(self, patience: float) -> int:
        """Return the number of blocks in the first message that reports stored KV-cache blocks.

        Return 0 after a timeout.
        """
        end = asyncio.get_running_loop().time() + patience
        while (left := end - asyncio.get_running_loop().time()) > 0:
            step = await self.next(left)
            if step is None:
                return 0
            if step.index:
                await self.acknowledge(step.index)
            if step.stored:
                return step.stored
        return 0

    async def until_done(self, slots: set[int]) -> list[ReceivedStep]:
        """Return all steps until the last entry of every slot.

        Raises:
            WrongError: No step comes in time, or the stream ends before.
        """
        steps: list[ReceivedStep] = []
        while slots:
            step = await self.next()
            if step is None or step.index == 0:
                ended = f"ended ({step.error})" if step else f"sent nothing for {PATIENCE:.0f} s"
                raise WrongError(
                    f"the step stream {ended} before slots {sorted(slots)} were complete; see Triton's log"
                )
            steps.append(step)
            slots = slots - {entry.slot for entry in step.entries if entry.flags & LAST_OF_SLOT}
            await self.acknowledge(step.index)
        return steps

    async def _read(self, call: Any) -> None:
        while True:
            try:
                response = await call.read()
            except WRITE_ERRORS as error:
                detail = error.details() if isinstance(error, aio.AioRpcError) else str(error)
                self._steps.put_nowait(ReceivedStep(0, [], detail or "broken"))
                return
            if response is aio.EOF:
                self._steps.put_nowait(ReceivedStep(0, [], "ended"))
                return
            self._take(response)

    def _take(self, response: Any) -> None:
        inner = response.infer_response
        if response.error_message:
            self._steps.put_nowait(ReceivedStep(0, [], response.error_message))
            return
        raw = dict(zip((output.name for output in inner.outputs), inner.raw_output_contents, strict=False))
        if contract.STEP_INDEX.name in raw:
            self._steps.put_nowait(_step(raw))
        elif inner.id == self._name and inner.parameters[FINAL_RESPONSE_PARAMETER].bool_param:
            self._steps.put_nowait(ReceivedStep(0, [], "final"))


def _step(raw: dict[str, bytes]) -> ReceivedStep:
    tokens = array("i", raw[contract.STEP_TOKENS.name]).tolist()
    errors = iter(decode_strings(raw.get(contract.STEP_ERRORS.name, b"")))
    entries, start = [], 0
    for slot, sequence, count, flags in struct.iter_unpack("<4i", raw[contract.STEP_ENTRIES.name]):
        error = next(errors, "") if flags & ERROR_FLAG else ""
        entries.append(StepEntry(slot, sequence, tokens[start : start + count], flags, error))
        start += count
    kinds = struct.iter_unpack("<2i", raw.get(contract.STEP_KV_EVENTS.name, b""))
    stored = sum(count for kind, count in kinds if kind == contract.KV_STORED)
    return ReceivedStep(int.from_bytes(raw[contract.STEP_INDEX.name], "little"), entries, stored=stored)
