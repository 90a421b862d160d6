"""Step streams: one subscription per gateway and engine model.

The engine sends one message per engine step for all requests of a subscription. docs/contract.md,
"Step streams", defines the messages.

After a broken connection, a subscription resumes after the last step that arrived. If the engine
does not know the subscription, because the engine was restarted, the open streams end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
import uuid
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

from grpc import aio

from llmops import contract
from llmops.background import TaskSet, cancel_tasks
from llmops.contract import (
    CANCELLED_FLAG,
    ERROR_FLAG,
    FINAL_RESPONSE_PARAMETER,
    FIRST_OF_SLOT,
    LAST_OF_SEQUENCE,
    LAST_OF_SLOT,
    MAX_UNACKNOWLEDGED_STEPS,
    NO_REPLY_ID,
    RECONNECT_GRACE_PERIOD,
    UNKNOWN_SUBSCRIPTION,
)
from llmops.gateway.errors import TRITON_UNREACHABLE, ApiError, DrainingError, UnavailableError
from llmops.gateway.interfaces import Engine, EngineRequest, ModelMetadata, TokenBatch, TokenStream, TopLogprobs
from llmops.gateway.triton.engine_observer import EngineObserver, decode_strings, notify_observer
from llmops.gateway.triton.grpc_client import WRITE_ERRORS
from llmops.gateway.triton.request_writer import RequestWriter
from llmops.gateway.triton.response_reader import condition_from_message, error_from_message
from llmops.gateway.triton.slot_stream import SlotStream
from llmops.gateway.triton.step_writer import StepWriter, Submission, parse_slots

#: Steps between two acknowledgements. An eighth of the engine's window, so that the window does not
#: fill while messages arrive.
ACKNOWLEDGE_INTERVAL = MAX_UNACKNOWLEDGED_STEPS // 8
#: Seconds between two attempts to reconnect. Attempts end when the engine drops the requests.
RECONNECT_INTERVAL = 0.1
# Seconds until a subscription that ended is opened again for its observer.
RESUBSCRIBE_DELAY = 0.25
#: Seconds until a subscription is opened again after a message that cannot be right. The delay is
#: long because the next message will most likely be no better, and each is logged.
FAULTY_DELAY = 30.0
#: Maximum number of entries in one step; more are an error. An engine has at most a few thousand
#: sequences in its batch.
MAX_STEP_ENTRIES = 16_384
#: Maximum number of log-probabilities and positions in one step; more are an error, because they
#: would take over a second to parse. 47,000 tokens have 20 log-probabilities each at this bound; an
#: engine's step has at most 16,000 tokens.
MAX_STEP_LOGPROBS = 2**20
_ENTRY_BYTES = 16
#: Seconds that a stopping gateway waits for the engine to end the subscription, before it closes
#: the connection anyway, so that a hanging engine does not delay the shutdown.
UNSUBSCRIBE_TIMEOUT = 1.0
# looked up here once, because each step needs them
STEP_INDEX, STEP_ENTRIES, STEP_TOKENS = contract.STEP_INDEX.name, contract.STEP_ENTRIES.name, contract.STEP_TOKENS.name
STEP_CACHED, STEP_STATE = contract.STEP_CACHED.name, contract.STEP_STATE.name
STEP_LOG_PROBS, STEP_ERRORS = contract.STEP_LOG_PROBS.name, contract.STEP_ERRORS.name
STEP_PROMPT_LENGTHS = contract.STEP_PROMPT_LENGTHS.name
STEP_TOP_COUNTS, STEP_TOP_IDS = contract.STEP_TOP_COUNTS.name, contract.STEP_TOP_IDS.name
STEP_TOP_LOG_PROBS = contract.STEP_TOP_LOG_PROBS.name
#: Beginning of gRPC's error text when no process listens on the port, from strerror(3).
CONNECTION_REFUSED = "Connection refused"
ENGINE_RESTARTED = "The engine was restarted while this answer was being generated; send the request again."


class StepStreamTransport(Engine):
    """An engine behind a step stream.

    The transport subscribes with the first request, and again after the subscription has ended.
    While an observer is set, the transport always holds a subscription.
    """

    name = contract.STEP_TRANSPORT

    def __init__(self, start_call: Callable[[], Any], engine_model: str, card: ModelMetadata) -> None:
        """Create a transport.

        Args:
            start_call: Starts a ModelStreamInfer call (the stub's method).
            engine_model: Name of the engine model in Triton.
            card: Metadata of the model.
        """
        self._start_call = start_call
        self._requests = RequestWriter.of(engine_model, card)
        self._subscription: StepSubscription | None = None
        self._opening = asyncio.Lock()
        self._observer: EngineObserver | None = None
        self._watching: asyncio.Task | None = None
        self._grace, self._demand = RECONNECT_GRACE_PERIOD, (0, 0)

    async def open(self, request: EngineRequest) -> TokenStream:
        subscription = self._subscription
        if subscription is None or subscription.ended:
            subscription = await self._subscribe()
        return subscription.submit(request)

    async def close(self) -> None:
        await cancel_tasks(self._watching)
        if self._subscription is not None:
            await self._subscription.close()

    def watch(self, observer: EngineObserver, grace: float) -> None:
        """Report the engine's state to `observer` from now on.

        Args:
            observer: The receiver of the reports.
            grace: Seconds that a broken stream has to recover. Choose a short time if there are
                other replicas, because waiting delays the failover. If `grace` is shorter than the
                engine's own grace period, the streams end at once when no process listens on the
                server's port.
        """
        self._observer, self._grace = observer, grace
        self._watching = asyncio.create_task(self._keep_subscribed(observer), name="step-stream-watch")

    def unwatch(self) -> None:
        """Stop reporting. Open streams continue."""
        if self._watching is not None:
            self._watching.cancel()

    def declare_demand(self, tokens: int, weights: int) -> None:
        """Declare to the engine how many tokens and weights wait in this gateway.

        The engine reports the sum of all gateways' declarations to every gateway.
        """
        self._demand = (tokens, weights)
        if self._subscription is not None:
            self._subscription.declare_demand(self._demand)

    def drain(self) -> None:
        """Make the engine reject new requests, from any gateway, until it is restarted."""
        if self._subscription is not None:
            self._subscription.drain()

    def oldest_unanswered(self, next_slot: int) -> SlotStream | None:
        """Return the oldest stream in a slot below `next_slot` of which the engine has sent nothing."""
        streams = () if self._subscription is None else self._subscription.streams
        return next((one for one in streams if one.number < next_slot and one.unconfirmed is not None), None)

    def abandon(self, error: ApiError, *, is_faulty: bool = False) -> None:
        """End all open streams with `error`, because another replica continues them.

        A faulty engine gets the next subscription after FAULTY_DELAY.
        """
        if self._subscription is not None and not self._subscription.ended and self._subscription.streams:
            self._subscription.is_faulty = is_faulty
            self._subscription.end(error)

    async def _keep_subscribed(self, observer: EngineObserver) -> None:
        while True:
            delay = RESUBSCRIBE_DELAY
            try:
                subscription = await self._subscribe()
                observer.on_disconnect(await asyncio.shield(subscription.over))
                if subscription.is_faulty:
                    delay = FAULTY_DELAY
            except ApiError as error:
                observer.on_disconnect(error)
            await asyncio.sleep(delay)

    async def _subscribe(self) -> StepSubscription:
        async with self._opening:
            if self._subscription is None or self._subscription.ended:
                subscription = StepSubscription(self._start_call, self._requests, self._observer, self._grace)
                await subscription.start()
                self._subscription = subscription
                if any(self._demand):
                    subscription.declare_demand(self._demand)
            return self._subscription


class StepSubscription:
    """A subscription to one engine, which connects, reads steps, reconnects and ends.

    Attributes:
        ended: True once the subscription delivers no more steps.
        over: Future that is set to the error when the subscription ends.
        is_faulty: True if the subscription ended because the engine sent what cannot be right.
    """

    def __init__(
        self,
        start_call: Callable[[], Any],
        requests: RequestWriter,
        observer: EngineObserver | None = None,
        grace: float = RECONNECT_GRACE_PERIOD,
    ) -> None:
        self.ended = self.is_faulty = False
        self.over: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._observer, self._grace = observer, grace
        self._start_call = start_call
        self._id = uuid.uuid4().hex
        self._writer = StepWriter(requests, self._id)
        self._vocab_size, self._next_slot = requests.vocab_size, 0
        self._streams: dict[int, SlotStream] = {}
        self._last = self._acknowledged = 0
        self._writing = asyncio.Lock()
        self._call: Any = None
        self._task: asyncio.Task | None = None
        # submissions that no message contains yet, by slot
        self._outbox: dict[int, Submission] = {}
        self._submitting = False
        # cancelled slots whose last entry has not arrived
        self._leaving: set[int] = set()
        self._sends = TaskSet()

    @property
    def streams(self) -> Collection[SlotStream]:
        """Return the open streams, in the order of their slots."""
        return self._streams.values()

    async def start(self) -> None:
        """Connect and subscribe. Raises UnavailableError if Triton cannot be reached."""
        self._call = self._start_call()
        try:
            await self._call.write(self._writer.subscribe(0, self._observer is not None))
        except WRITE_ERRORS as error:
            detail = await self._call.details()
            raise UnavailableError(TRITON_UNREACHABLE, detail=str(detail or error)) from error
        self._task = asyncio.create_task(self._run(), name="step-stream")

    def submit(self, request: EngineRequest) -> SlotStream:
        """Submit a request.

        Submissions that arrive while a message is being written are sent together in the next
        message.
        """
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        submission = self._writer.submission(request, slot)
        stream = self._streams[slot] = SlotStream(slot, submission, request.n, self.cancel)
        self._outbox[slot] = submission
        if not self._submitting:
            self._submitting = True
            self._sends.start(self._submit())
        return stream

    def cancel(self, slot: int) -> None:
        if self._streams.pop(slot, None) is None or self.ended:
            return
        if self._outbox.pop(slot, None) is None:
            self._leaving.add(slot)
            self._sends.start(self._write(self._writer.cancel(slot)))

    async def close(self) -> None:
        self._fail_open(UnavailableError("The gateway is shutting down; send the request again."))
        if not self.ended:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._leave(), UNSUBSCRIBE_TIMEOUT)
        self.end(UnavailableError("The gateway is shutting down; send the request again."))
        await cancel_tasks(self._task)

    def declare_demand(self, demand: tuple[int, int]) -> None:
        self._acknowledged = self._last
        self._sends.start(self._write(self._writer.acknowledge(self._last, demand)))

    def drain(self) -> None:
        self._sends.start(self._write(self._writer.drain()))

    async def _leave(self) -> None:
        """Unsubscribe. The engine would otherwise continue these answers for its grace period."""
        await self._write(self._writer.leave())
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _submit(self) -> None:
        try:
            while self._outbox:
                await self._write_outbox()
        except Exception as error:  # a bug must not leave clients waiting
            self.end(UnavailableError("The stream to the engine broke; send the request again.", detail=repr(error)))
            raise
        finally:
            self._submitting = False

    async def _write_outbox(self) -> None:
        async with self._writing:
            # read the outbox only under the lock: submissions that are cancelled before are never
            # sent
            submissions, self._outbox = list(self._outbox.values()), {}
            if submissions:
                await self._write_now(self._writer.submit(submissions))

    async def _write(self, message: Any) -> None:
        async with self._writing:
            await self._write_now(message)

    async def _write_now(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except WRITE_ERRORS:
            # the reading task notices the same break, and repeats the messages that did not arrive
            return

    async def _run(self) -> None:
        try:
            while not self.ended:
                await self._read_steps()
                if not self.ended:
                    await self._resume()
        except (IndexError, KeyError, OverflowError, ValueError, struct.error) as error:
            self.is_faulty = True
            self.end(
                UnavailableError(
                    "The engine sent a message that cannot be read; send the request again later.", detail=repr(error)
                )
            )
        except Exception as error:  # a bug must not leave clients waiting
            self.end(UnavailableError("The stream from the engine broke; send the request again.", detail=repr(error)))
            raise

    async def _read_steps(self) -> None:
        """Read steps until the connection breaks or the engine ends the subscription."""
        while not self.ended:
            try:
                response = await self._call.read()
            except aio.AioRpcError:
                return
            if response is aio.EOF:
                return
            if response.error_message:
                self._fail_slots(response.infer_response.id, response.error_message)
            else:
                await self._step(response.infer_response)

    def _fail_slots(self, message_id: str, text: str) -> None:
        """Fail the slots that an error message names.

        Fail all slots if the message has the id of the subscription itself.
        """
        if UNKNOWN_SUBSCRIPTION in text:
            self.end(UnavailableError(ENGINE_RESTARTED))
            return
        slots = parse_slots(message_id)
        if not slots and message_id != NO_REPLY_ID:
            ended = UnavailableError("The engine ended the stream; send the request again.", detail=text)
            self.end(condition_from_message(text) or ended)
        self._leaving.difference_update(slots)
        for slot in slots:
            stream = self._streams.pop(slot, None)
            if stream is not None:
                stream.fail(error_from_message(text))

    async def _step(self, response: Any) -> None:
        outputs = {output.name: at for at, output in enumerate(response.outputs)}
        if self._observer is not None:
            notify_observer(self._observer, outputs, response.raw_output_contents)
        if STEP_INDEX in outputs:
            self._last += 1
            if int.from_bytes(response.raw_output_contents[outputs[STEP_INDEX]], "little") != self._last:
                raise ValueError(f"a step is not step {self._last}, which was expected")
            self._deliver(outputs, response.raw_output_contents)
            if self._last - self._acknowledged >= ACKNOWLEDGE_INTERVAL:
                self._acknowledged = self._last
                await self._write(self._writer.acknowledge(self._last))
        elif STEP_STATE not in outputs and FINAL_RESPONSE_PARAMETER in response.parameters and response.id == self._id:
            self.end(DrainingError("The engine is shutting down; send the request again."))

    def _deliver(self, outputs: dict[str, int], raw: Sequence[bytes]) -> None:
        entries = raw[outputs[STEP_ENTRIES]]
        if len(entries) > MAX_STEP_ENTRIES * _ENTRY_BYTES:
            raise ValueError(f"a step has {len(entries) // _ENTRY_BYTES} entries, which are too many")
        # read as unsigned numbers: a negative number is too large
        tokens = array("I", raw[outputs[STEP_TOKENS]]).tolist()
        if sum(array("I", entries)[2::4]) != len(tokens):
            raise ValueError(f"a step has {len(tokens)} tokens, and its entries count others")
        if tokens and max(tokens) >= self._vocab_size:
            raise ValueError(f"a step has a token id outside the vocabulary of {self._vocab_size}; check vocab_size")
        scores = array("f", raw[outputs[STEP_LOG_PROBS]]).tolist() if STEP_LOG_PROBS in outputs else None
        tops = _top_logprobs(outputs, raw)
        errors = decode_strings(raw[outputs[STEP_ERRORS]]) if STEP_ERRORS in outputs else iter(())
        cached = iter(array("i", raw[outputs[STEP_CACHED]])) if STEP_CACHED in outputs else iter(())
        lengths = iter(array("i", raw[outputs[STEP_PROMPT_LENGTHS]])) if STEP_PROMPT_LENGTHS in outputs else iter(())
        streams, start, prompt_start = self._streams, 0, len(tokens)
        for slot, sequence, count, flags in struct.iter_unpack("<4I", entries):
            end = start + count
            error = next(errors, "the engine failed") if flags & ERROR_FLAG else None
            stream, prompt = streams.get(slot), None
            if slot >= self._next_slot or (stream is not None and sequence >= stream.sequences):
                raise ValueError(f"a step has tokens for sequence {sequence} of slot {slot}, which was not requested")
            if flags & FIRST_OF_SLOT:
                known, length = next(cached, -1), max(next(lengths, 0), 0)
                if length and tops is not None:
                    prompt = tops[prompt_start : prompt_start + length]
                    prompt_start += length
                if stream is not None and known >= 0:
                    stream.cached_tokens = known
            if flags & LAST_OF_SLOT:
                streams.pop(slot, None)
                self._leaving.discard(slot)
            if stream is not None:
                if count:
                    logprobs = scores[start:end] if scores is not None else None
                    ranked = tops[start:end] if tops is not None else None
                    stream.push(TokenBatch(sequence, tokens[start:end], logprobs, tops=ranked, prompt=prompt))
                if flags:
                    if flags & LAST_OF_SEQUENCE and not flags & (ERROR_FLAG | CANCELLED_FLAG):
                        stream.ended = {*stream.ended, sequence}
                    stream.mark(flags, error)
            start = end

    async def _resume(self) -> None:
        """Reconnect and resume after the last step that arrived.

        End the subscription if reconnecting fails until the grace time is over.
        """
        deadline = time.monotonic() + self._grace
        while self._streams:
            self._call.cancel()
            try:
                async with self._writing:
                    # replaced under the lock: other writes must follow `subscribe` on the new call
                    self._call = self._start_call()
                    await self._repeat_unconfirmed()
                return
            except WRITE_ERRORS:
                if time.monotonic() > deadline or await self._is_gone():
                    break
            await asyncio.sleep(RECONNECT_INTERVAL)
        self.end(UnavailableError("Triton went away while this answer was being generated; send the request again."))

    async def _is_gone(self) -> bool:
        """Return True if no process listens on the server's port and other replicas take over."""
        return self._grace < RECONNECT_GRACE_PERIOD and CONNECTION_REFUSED in str(await self._call.details())

    async def _repeat_unconfirmed(self) -> None:
        """Repeat the messages that the engine may not have received, on a new connection.

        Submissions without an entry are sent first, then the cancellations, by slot.
        """
        await self._call.write(self._writer.subscribe(self._last, self._observer is not None))
        unconfirmed = [one.unconfirmed for one in self._streams.values() if one.unconfirmed is not None]
        # `unconfirmed` includes the outbox; a later cancel of these slots must reach the engine
        self._outbox = {}
        if unconfirmed:
            await self._call.write(self._writer.submit(unconfirmed))
        for slot in sorted(self._leaving):
            await self._call.write(self._writer.cancel(slot))

    def end(self, error: ApiError) -> None:
        """Fail all open streams with `error`, and stop reading steps."""
        self.ended = True
        if not self.over.done():
            self.over.set_result(error)
        self._fail_open(error)
        if self._call is not None:
            self._call.cancel()

    def _fail_open(self, error: ApiError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)


def _top_logprobs(outputs: dict[str, int], raw: Sequence[bytes]) -> list[TopLogprobs] | None:
    """Return the most likely tokens at each position of a step, followed by its prompts' positions.

    Return None if the step has no such log-probabilities, because no request asks for them.
    `outputs` has the index in `raw` of each output tensor, by name.
    """
    if STEP_TOP_COUNTS not in outputs:
        return None
    counts, ids = array("i", raw[outputs[STEP_TOP_COUNTS]]), array("i", raw[outputs[STEP_TOP_IDS]])
    if len(counts) + len(ids) > MAX_STEP_LOGPROBS:
        raise ValueError(
            f"a step has {len(ids)} log-probabilities at {len(counts)} positions; at most {MAX_STEP_LOGPROBS} are "
            "allowed in all"
        )
    pairs = zip(ids, array("f", raw[outputs[STEP_TOP_LOG_PROBS]]), strict=True)
    return [list(itertools.islice(pairs, count)) for count in counts]
