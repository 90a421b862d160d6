"""The writer that turns requests into usage events.

Running requests are counted in a memory-mapped slot, and ended requests are written to the outbox
in batches. The event of an ended request is in its slot before the last bytes of the answer are
sent, so it survives a killed process. `flush` writes the events of many requests to the outbox in
one transaction and frees their slots.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from llmops.clocks import utc_now
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Usage, UsageEvent, UsageOwner, UsageRecorder, shared_answer_id
from llmops.gateway.usage.event_formats import (
    EncodedEvent,
    decode_event,
    encode_event,
    format_event_id,
    new_event_id,
    parse_event_id,
)
from llmops.gateway.usage.open_answers import (
    CACHED,
    MARK,
    NUMBERS_BYTES,
    SHARED,
    STATE,
    TOKENS,
    UNSAVED,
    AnswerSlot,
    OpenAnswers,
    UnfinishedAnswer,
    read_slots,
)
from llmops.gateway.usage.outbox import ANSWERS_COUNT, ANSWERS_MARK, UsageOutbox
from llmops.gateway.usage.outbox_folders import keep_damaged, new_gateway_id
from llmops.gateway.usage.sink import Prices

log = logging.getLogger(__name__)

#: Finish reason of an answer whose gateway process died.
GATEWAY_LOST = "gateway_lost"
#: Maximum length of a request id, in characters: the width of `usage_records.request_id`.
_MAX_REQUEST_ID_LENGTH = 64
_SLOTS_FILE = "open-answers"
#: Maximum difference of the marks of a file of open answers and of an older outbox: marks of
#: another outbox differ by more.
_MAX_AHEAD = 2**32


class OutboxWriter:
    """The writer of one process's events.

    Events that the outbox does not accept stay in memory and in their slots until `flush` succeeds.

    Attributes:
        gateway_id: The id of this process in its events.
        next_seq: The number of the next event.
        offered: The number of answers that stay in their slots when this process ends, because
            other gateways may continue them.
        prices: The source of prices.
        trouble: The reason why events cannot be written now; empty if they can.
    """

    def __init__(self, folder: Path, outbox: UsageOutbox, prices: Prices) -> None:
        """Create the file of slots. The folder's name becomes the gateway id of the events.

        Raises:
            OSError: The disk has no space for the slots.
        """
        self.gateway_id, self.next_seq = folder.name, 0
        self.offered = 0
        self.prices, self.trouble = prices, ""
        self._outbox = outbox
        self._slots = OpenAnswers(folder / _SLOTS_FILE)
        # A random start, so that the file of another outbox has another mark.
        self._slots.header[MARK] = outbox.answers[ANSWERS_MARK] = random.getrandbits(62)
        self._pending: dict[EncodedEvent, AnswerSlot | None] = {}

    def recorder(self, context: RequestContext) -> UsageRecorder:
        """Return a recorder of the usage of one request."""
        return _RequestUsage(self, context)

    def open(
        self, event_id: tuple[int, int], context: RequestContext, model: str, answer_id: str, prompt: int
    ) -> AnswerSlot | None:
        """Return a slot for a request with `prompt` prompt tokens.

        Without disk space, return None: if the process crashes, the usage of the request is lost.
        """
        slot = self._slots.take()
        if slot is not None:
            caller = context.caller
            texts = [model, answer_id[:_MAX_REQUEST_ID_LENGTH]]
            texts += [caller.tenant_id, caller.user_id, caller.key_id, caller.tier]
            slot.open(event_id, round(context.arrived.timestamp() * 1e6), prompt, texts)
            self._outbox.answers[ANSWERS_COUNT] += 1
        return slot

    def end(self, event: UsageEvent, slot: AnswerSlot | None) -> None:
        """Record the event of an ended request. The event's number must be `next_seq`."""
        self.next_seq += 1
        encoded = encode_event(event)
        self._pending[encoded] = slot
        if slot is None:
            self._slots.header[UNSAVED] += 1
        if slot is None or not slot.end(encoded):
            self.flush()

    def release(self, slot: AnswerSlot | None) -> None:
        """Free the slot of a request that is not billed."""
        if slot is not None:
            self._outbox.answers[ANSWERS_COUNT] -= 1
            self._slots.release(slot)

    def flush(self) -> None:
        """Write the events of all ended requests to the outbox; on failure, set `trouble`."""
        if self._outbox.answers[ANSWERS_COUNT]:
            self._slots.header[MARK] += 1
            self._outbox.answers[ANSWERS_MARK] += 1
        if not self._pending and not self.trouble:
            return
        try:
            self._outbox.add(list(self._pending))
        except sqlite3.Error as error:
            if not self.trouble:
                log.error(
                    "Usage cannot be written to the outbox (%s); the gateway keeps it in memory and retries.", error
                )
            self.trouble = str(error)
            return
        self._slots.header[UNSAVED] = 0
        for slot in self._pending.values():
            self.release(slot)
        self._pending.clear()
        if self.trouble:
            log.warning("Usage can be written to the outbox again.")
            self.trouble = ""

    def next_unsaved(self, limit: int) -> list[EncodedEvent]:
        """Return the first events that are neither in the outbox nor in a slot, at most `limit`."""
        return list(islice((event for event, slot in self._pending.items() if slot is None), limit))

    def drop(self, events: Sequence[EncodedEvent]) -> None:
        """Forget unsaved events that went to the ledger past the outbox."""
        # `flush` may have added them to the outbox in the meantime.
        sent = self._pending.keys() & events
        for event in sent:
            del self._pending[event]
        self._slots.header[UNSAVED] -= len(sent)
        self._outbox.skip(len(sent))

    def close(self) -> None:
        """Write pending events if possible. The rest stays in its slots for the next process."""
        self.flush()
        if self.unsaved:
            log.error(
                "%d usage events are lost and not billed, because neither the outbox (%s) nor the ledger took them "
                "before the gateway ended.",
                self.unsaved,
                self.trouble,
            )
        self._slots.close()

    @property
    def pending(self) -> int:
        """Return the number of events that are not in the outbox yet."""
        return len(self._pending)

    @property
    def unsaved(self) -> int:
        """Return the number of events that are neither in the outbox nor in a slot."""
        return self._slots.header[UNSAVED]


def shared_answer_ids(folder: Path) -> list[str]:
    """Return the ids of the answers in `folder` that other gateways may have continued."""
    return [_shared_id(answer) for answer in read_slots(folder / _SLOTS_FILE).unfinished if answer.is_shared]


def recover_open_answers(
    folder: Path, outbox: UsageOutbox, prices: Prices, elsewhere: frozenset[str] = frozenset()
) -> int:
    """Add the usage in the slots that a dead process left in `folder` to `outbox`.

    The file of the slots is deleted. Answers in `elsewhere` are billed by gateways that took them
    over.

    Answers that were running get events under a new gateway id, because the dead gateway may have
    given the next numbers to events that its outbox has lost.

    Returns:
        The number of events that the dead process wrote, sent past the outbox or lost.

    Raises:
        OSError: The file of the slots cannot be read.
        sqlite3.Error: The outbox does not accept the events.
    """
    path = folder / _SLOTS_FILE
    slots = read_slots(path)
    if slots.damaged:
        log.error(
            "%d requests that ran when a gateway died cannot be billed, because their records are damaged. The "
            "records are kept in %s.",
            slots.damaged,
            keep_damaged(path),
        )
    mark, count = outbox.answers
    ahead, found = slots.mark - mark, len(slots.unfinished) + len(slots.ended) + slots.damaged
    # The mark of an older outbox may be lower; a process may die before it writes the second mark.
    if count and (not 0 <= ahead < _MAX_AHEAD or (ahead <= 1 and found < count)):
        log.error(
            "%d requests ran when a gateway died, but the file %s is not as that gateway left it and has records of "
            "%d. Requests that it lacks are not billed, and others may be billed for too few tokens. If the machine "
            "did not crash, check its disk.",
            count,
            path,
            found,
        )
    # Skip events that the outbox has already: a process may die after adding them and before
    # freeing their slots.
    known = outbox.known([event.id for event in slots.ended] + [answer.id for answer in slots.unfinished])
    lost = [
        answer
        for answer in slots.unfinished
        if answer.id not in known and answer.tokens and _shared_id(answer) not in elsewhere
    ]
    gateway_id = new_gateway_id()
    events = [event for event in slots.ended if event.id not in known]
    written = outbox.last_place + len(events) + slots.unsaved
    if slots.unsaved and events:
        # The last event takes the last number, so that the ledger misses the numbers of lost events.
        last = max(map(decode_event, events), key=lambda event: event.seq)
        events.remove(encode_event(last))
        events.append(encode_event(last._replace(seq=max(last.seq, written - 1))))
    events += [encode_event(_lost_event(answer, gateway_id, seq, prices)) for seq, answer in enumerate(lost)]
    if events:
        outbox.add(events)
    outbox.skip(slots.unsaved)
    outbox.answers[ANSWERS_COUNT] = 0
    path.unlink(missing_ok=True)
    if slots.unsaved:
        log.error(
            "%d usage events are lost with the gateway %s and not billed, because its outbox could not be written. "
            "Make room for outboxes.",
            slots.unsaved,
            folder.name,
        )
    if lost:
        log.warning(
            "%d requests were lost with a gateway that died; they are billed for the tokens generated until then.",
            len(lost),
        )
    return written


def _shared_id(answer: UnfinishedAnswer) -> str:
    _, answer_id, tenant_id, user_id, *_ = [*answer.texts, *[""] * 4]
    return shared_answer_id(Caller(tenant_id=tenant_id, user_id=user_id).owner, answer_id)


def _lost_event(answer: UnfinishedAnswer, gateway_id: str, seq: int, prices: Prices) -> UsageEvent:
    model, request_id, tenant_id, user_id, key_id, tier, *_ = [*answer.texts, *[""] * 6]
    usage = Usage(answer.prompt, answer.tokens, cached_tokens=answer.cached)
    cost, price_id = prices.bill(model, usage, answer.started)
    return UsageEvent(
        id=answer.id,
        gateway_id=gateway_id,
        seq=seq,
        at=answer.started,
        request_id=request_id,
        tenant_id=tenant_id,
        user_id=user_id,
        key_id=key_id,
        model=model,
        input_tokens=answer.prompt,
        cached_tokens=answer.cached,
        output_tokens=answer.tokens,
        cost_micros=cost,
        price_id=price_id,
        status=0,
        finish_reason=GATEWAY_LOST,
        priority=tier or None,
    )


class _RequestUsage(UsageRecorder):
    """The recorder of one request's usage."""

    def __init__(self, writer: OutboxWriter, context: RequestContext) -> None:
        self._writer, self._context = writer, context
        self._open, self._known = False, 0
        # None if the end is recorded at once. Otherwise the arguments of `end`, which are empty
        # until `end` is called.
        self._held: tuple[Any, ...] | None = None

    @property
    def event_id(self) -> str:
        return format_event_id(*self._id) if self._open else ""

    def begin(
        self, model: str, answer_id: str, prompt_tokens: int, *, event_id: str = "", known_tokens: int = 0
    ) -> None:
        self._open, self._model, self._answer_id, self._known = True, model, answer_id, known_tokens
        self._id = parse_event_id(event_id) if event_id else new_event_id()
        self._slot = self._writer.open(self._id, self._context, model, answer_id, prompt_tokens)
        # Without a slot, write the counts to a buffer that is never read.
        self._numbers = memoryview(bytearray(NUMBERS_BYTES)).cast("q") if self._slot is None else self._slot.numbers
        self._numbers[TOKENS] = known_tokens

    def cached(self, tokens: int) -> None:
        self._numbers[CACHED] = tokens

    def count(self, tokens: int) -> None:
        self._numbers[TOKENS] = tokens + self._known

    def hold(self) -> None:
        self._held = ()
        self._numbers[STATE] = SHARED

    def settle(self, owner: UsageOwner) -> None:
        held, self._held = self._held, None
        if not self._open:
            return
        if owner is UsageOwner.HERE:
            if held:
                self.end(*held)
            return
        self._open = False
        if owner is UsageOwner.OFFERED:
            self._writer.offered += 1
        else:
            self._writer.release(self._slot)

    def end(self, outcome: Outcome, first: float = 0.0, replica: str = "", moves: int = 0) -> None:
        if not self._open:
            return
        if self._held is not None:
            self._held = self._held or (outcome, first, replica, moves)
            return
        self._open = False
        usage, writer, context = outcome.usage, self._writer, self._context
        if usage is None or not outcome.is_billed:
            writer.release(self._slot)
            return
        caller, at = context.caller, utc_now()
        seconds = time.perf_counter() - context.started
        # The price of the start is the one by which budgets reserve money.
        cost, price_id = writer.prices.bill(self._model, usage, context.arrived)
        event = UsageEvent(
            id=format_event_id(*self._id),
            gateway_id=writer.gateway_id,
            seq=writer.next_seq,
            at=at,
            request_id=self._answer_id[:_MAX_REQUEST_ID_LENGTH],
            tenant_id=caller.tenant_id,
            user_id=caller.user_id,
            key_id=caller.key_id,
            model=self._model,
            input_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens or 0,
            output_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            cost_micros=cost,
            price_id=price_id,
            status=outcome.status,
            finish_reason=outcome.finish or None,
            ttft_ms=round((first - context.started) * 1000) if first else None,
            latency_ms=round(seconds * 1000),
            priority=caller.tier or None,
            version=context.version or None,
            replica=replica or None,
            migrations=moves,
        )
        writer.end(event, self._slot)
