"""Requests become events: counted in the page while they are open, written to the journal before they end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from llmops.clocks import utc_now
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome, Usage, UsageEvent, UsageRecorder
from llmops.gateway.usage.event_formats import format_event_id, new_event_id
from llmops.gateway.usage.open_answers import (
    CACHED,
    NUMBERS_BYTES,
    PROMPT,
    TOKENS,
    AnswerSlot,
    OpenAnswers,
    UnfinishedAnswer,
    read_unfinished,
)
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.outbox_folders import keep_damaged
from llmops.gateway.usage.sink import Prices
from llmops.tuples import namedtuple_factory

log = logging.getLogger(__name__)

GATEWAY_LOST = "gateway_lost"
# such an end without a token is nobody's to pay
_FAILED_FINISH_REASONS = frozenset({"error", "engine_lost"})
# of usage_records.request_id
_MAX_REQUEST_ID_LENGTH = 64


_make_event = namedtuple_factory(UsageEvent)


class OutboxWriter:
    """Of one worker. `trouble` says why events cannot be written now, and is empty otherwise.

    An event that the disk does not take is kept, and so is its slot on the page; `retry` tries again. There are never
    more of them than there were open requests.
    """

    def __init__(
        self, folder: Path, journal: UsageOutbox, prices: Prices, now: Callable[[], datetime] = utc_now
    ) -> None:
        """What a process that died left on the page of `folder` goes into the journal first. Raises OSError."""
        self.journal, self.prices, self.now = journal, prices, now
        page = folder / "page"
        self._take_up(page)
        self._page = OpenAnswers(page)
        self._kept: list[tuple[UsageEvent, AnswerSlot | None]] = []
        self.trouble = ""
        # there is something that is not on the disk yet
        self.dirty = asyncio.Event()
        self.dirty.set()

    def tally(self, context: RequestContext) -> UsageRecorder:
        return _RequestUsage(self, context)

    def open(
        self, event_id: tuple[int, int], context: RequestContext, model: str, answer_id: str, prompt: int
    ) -> AnswerSlot | None:
        """A place on the page. None where there is no room for another: then only a crash would lose the request."""
        slot = self._page.take()
        if slot is not None:
            caller = context.caller
            texts = [
                model,
                answer_id[:_MAX_REQUEST_ID_LENGTH],
                caller.tenant_id,
                caller.user_id,
                caller.key_id,
                caller.tier,
            ]
            slot.open(event_id, time.time_ns() // 1000, prompt, texts)
        return slot

    def end(self, event: UsageEvent, slot: AnswerSlot | None) -> None:
        """Write it down."""
        try:
            self.journal.append(event)
        except OSError as error:
            self._keep(event, slot, error)
            return
        self.dirty.set()
        self.drop(slot)

    def drop(self, slot: AnswerSlot | None) -> None:
        if slot is not None:
            self._page.give(slot)

    def retry(self) -> None:
        """What the disk did not take is offered again."""
        while self._kept:
            event, slot = self._kept[0]
            try:
                self.journal.append(event._replace(seq=self.journal.next_seq))
            except OSError:
                return
            del self._kept[0]
            self.dirty.set()
            self.drop(slot)
        if self.trouble:
            log.warning("Usage can be written again.")
            self.trouble = ""

    def close(self) -> None:
        self.retry()
        self._page.close()

    def _keep(self, event: UsageEvent, slot: AnswerSlot | None, error: OSError) -> None:
        if not self.trouble:
            self.trouble = error.strerror or str(error)
            log.error("Usage cannot be written (%s); it is kept in memory until it can.", self.trouble)
        if slot is not None:
            slot.numbers[PROMPT], slot.numbers[CACHED] = event.input_tokens, event.cached_tokens
            slot.numbers[TOKENS] = event.output_tokens
        self._kept.append((event, slot))
        self.dirty.set()

    def _take_up(self, page: Path) -> None:
        written = self.journal.found
        found, damaged = read_unfinished(page)
        if damaged:
            log.error(
                "%d requests that were open when a gateway died cannot be billed: their records are damaged. They are "
                "kept in %s.",
                damaged,
                keep_damaged(page),
            )
        left = [one for one in found if one.id not in written and one.tokens]
        written.clear()
        for one in left:
            self.journal.append(self._lost(one))
        if left:
            log.warning("%d requests were lost with a gateway that died; what they used is in the journal.", len(left))

    def _lost(self, left: UnfinishedAnswer) -> UsageEvent:
        model, request_id, tenant_id, user_id, key_id, tier, *_ = [*left.texts, *[""] * 6]
        used = Usage(left.prompt, left.tokens, cached_tokens=left.cached)
        cost, price = self.prices.bill(model, used, left.started)
        return UsageEvent(
            id=left.id,
            gateway_id=self.journal.gateway_id,
            seq=self.journal.next_seq,
            at=left.started,
            request_id=request_id,
            tenant_id=tenant_id,
            user_id=user_id,
            key_id=key_id,
            model=model,
            input_tokens=left.prompt,
            cached_tokens=left.cached,
            output_tokens=left.tokens,
            cost_micros=cost,
            price_id=price,
            status=0,
            finish_reason=GATEWAY_LOST,
            priority=tier or None,
        )


class _RequestUsage(UsageRecorder):
    __slots__ = ("_context", "_id", "_meter", "_model", "_name", "_numbers", "_open", "_slot")

    def __init__(self, meter: OutboxWriter, context: RequestContext) -> None:
        self._meter, self._context = meter, context
        self._open = False

    def begin(self, model: str, answer_id: str, prompt_tokens: int) -> None:
        self._open, self._model, self._name = True, model, answer_id
        self._id = new_event_id()
        self._slot = self._meter.open(self._id, self._context, model, answer_id, prompt_tokens)
        # what nobody will read, where there was no room on the page
        self._numbers = memoryview(bytearray(NUMBERS_BYTES)).cast("q") if self._slot is None else self._slot.numbers

    def cached(self, tokens: int) -> None:
        self._numbers[CACHED] = tokens

    def count(self, tokens: int) -> None:
        self._numbers[TOKENS] = tokens

    def end(self, outcome: Outcome, first: float = 0.0, replica: str = "", moves: int = 0) -> None:
        if not self._open:
            return
        self._open = False
        usage = outcome.usage
        if usage is None or (outcome.finish in _FAILED_FINISH_REASONS and not usage.completion_tokens):
            self._meter.drop(self._slot)
            return
        context, caller, meter, now = self._context, self._context.caller, self._meter, time.perf_counter()
        at = meter.now()
        cost, price = meter.prices.bill(self._model, usage, at)
        meter.end(
            _make_event(
                (
                    format_event_id(*self._id),
                    meter.journal.gateway_id,
                    meter.journal.next_seq,
                    at,
                    self._name[:_MAX_REQUEST_ID_LENGTH],
                    caller.tenant_id,
                    caller.user_id,
                    caller.key_id,
                    self._model,
                    usage.prompt_tokens,
                    usage.cached_tokens or 0,
                    usage.completion_tokens,
                    usage.reasoning_tokens,
                    cost,
                    price,
                    outcome.status,
                    outcome.finish or None,
                    round((first - context.started) * 1000) if first else None,
                    round((now - context.started) * 1000),
                    caller.tier or None,
                    None,
                    replica or None,
                    moves,
                )
            ),
            self._slot,
        )
