"""One response that is being generated.

The text of the answer becomes items and events, and the result is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from llmops.gateway.conversations.event_replay import LiveEventStream, encode_events, events_after
from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.response_builder import Event, ResponseBuilder, TokenCounts
from llmops.gateway.conversations.response_store import ResponseStore, StoredResponse
from llmops.gateway.errors import ApiError, CancelledStreamError, InternalError, log_detail
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.http.request_context import RequestContext

log = logging.getLogger(__name__)

# Seconds between two reports of a background response to a store that other gateways read.
REPORT_INTERVAL = 2.0


class RunningResponses:
    """The responses that this process generates, by id, and the store where they go when they end."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._runs: dict[str, ResponseRun] = {}
        self._tasks: set[asyncio.Task[object]] = set()

    def find(self, response_id: str, owner: str) -> ResponseRun | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    def add(self, run: ResponseRun) -> None:
        self._runs[run.id] = run

    def remove(self, run: ResponseRun) -> None:
        self._runs.pop(run.id, None)

    def soon(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` in a task that `close` waits for."""
        task = asyncio.create_task(work, name="response")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait until what ended is stored, and close the store."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()


class ResponseRun(AnswerEvents):
    """One response: streamed to its client, collected, or generated in the background.

    Other clients may follow it. However the response ends, it is stored before the client sees its
    end. If it cannot be stored, its last state says `"store": false`. Without `running` nothing is
    stored.
    """

    def __init__(
        self,
        answer: Answer,
        builder: ResponseBuilder,
        items: list[Item],
        owner: str,
        running: RunningResponses | None,
        conversation: Callable[[StoredResponse], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare the run of an answer.

        `conversation` adds the end of the response to its conversation.
        """
        super().__init__(answer)
        self._conversation = conversation
        self.owner = owner
        self._builder, self._items, self._running = builder, items, running
        self._begun = self._closed = self._shown = self._announced = False
        self._unsaved: StoredResponse | None = None
        self._followers: list[LiveEventStream] = []
        self._last: list[Event] = []

    @property
    def id(self) -> str:
        return self._builder.id

    def begin(self) -> ResponseRun:
        """Let others find the response while it runs; without this only its end is stored."""
        self._shown = True
        if self._running is not None:
            self._running.add(self)
        return self

    async def announce(self) -> None:
        """Store that the response is running, for every gateway.

        Raises UnavailableError if it cannot be stored.
        """
        if self._running is not None:
            await self._running.store.put(self.entry(running=True).to_row())
            self._announced = True

    def entry(self, running: bool = False) -> StoredResponse:
        """Return the present state; later deltas do not change it."""
        cuts = [list(sizes) for sizes in self._builder.cuts]
        return StoredResponse(self.owner, self._builder.so_far(), self._items, cuts, running)

    def follow(self, after: int = -1) -> LiveEventStream:
        """Return another reader: the events after number `after`, then what comes."""
        past = events_after(after, self._builder.so_far(), self._builder.cuts) if self._begun else ()
        follower = LiveEventStream(list(past))
        if self._closed:
            follower.end()
        else:
            self._followers.append(follower)
        return follower

    def discard(self) -> None:
        """Stop the response and store nothing of it: it was deleted."""
        running, self._running = self._running, None
        if running is not None:
            running.remove(self)
        self.cancel()

    # -- as an event source

    async def start(self, context: RequestContext) -> None:
        await super().start(context)
        self.begin()

    def start_failed(self, error: Exception) -> None:
        super().start_failed(error)
        self._shown = True

    async def next(self) -> bytes | None:
        data = await super().next()
        if not await self._save():
            return encode_events(self._last)
        return data

    def render(self, delta: ChoiceDelta) -> bytes:
        return self._published(self._events(delta))

    def end(self) -> bytes:
        return self._published(self._finish())

    def failed(self, error: ApiError) -> bytes:
        return self._published(self._fail(error))

    def cancel(self) -> None:
        super().cancel()
        self._stop()

    def close(self) -> None:
        super().close()
        if self._shown:
            self._stop()  # the client went away before the end

    # -- without a stream

    async def collect(self) -> dict[str, object]:
        """Return the whole response.

        Errors of the engine are raised.
        """
        (choice,) = self._answer.choices
        try:
            while (delta := await self._answer.next()) is not None:
                if delta.choice is not choice:
                    choice = delta.choice
                    self._builder.restart()
                self._publish(self._events(delta))
        except CancelledStreamError:
            if self._builder.response["status"] != "cancelled":
                raise
            return self._builder.response
        except ApiError as error:
            self._publish(self._fail(error))
            await self._save()
            raise
        self._publish(self._finish())
        await self._save()
        return self._builder.response

    async def in_background(self) -> None:
        """Run to the end, with or without readers."""
        reports = None
        if self._running is not None and self._running.store.shared:
            reports = asyncio.create_task(self._report(self._running.store), name="report-response")
        try:
            await self._answer.start()
            await self.collect()
        except ApiError as error:
            self._give_up(error)
        except Exception:
            log.exception("Response %s failed", self.id)
            self._give_up(InternalError("The gateway failed in the middle of the response."))
        finally:
            if reports is not None:
                reports.cancel()
            await self._save()
            self.close()

    async def _report(self, store: ResponseStore) -> None:
        """Store the state now and then.

        The run stops when another gateway cancelled or deleted the response.
        """
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            try:
                if not await store.put(self.entry(running=True).to_row(), new=False):
                    break
                continue
            except ApiError as error:
                log_detail(error)
        if await store.find(self.id, self.owner) is None:
            self.discard()
        else:
            self.cancel()

    def _give_up(self, error: ApiError) -> None:
        log_detail(error)
        log.info("Response %s ended early: %s", self.id, error.message)
        if not self._closed:
            self._publish(self._fail(error))

    # -- events

    def _published(self, events: list[Event]) -> bytes:
        data = encode_events(events)
        if self._closed:
            self._last = events  # followers may have them when the response is stored
        else:
            for follower in self._followers:
                follower.put(data)
        return data

    def _publish(self, events: list[Event]) -> None:
        """Publish events whose bytes the caller does not need."""
        if self._closed:
            self._last = events
        elif self._followers:
            self._published(events)

    def _release(self) -> None:
        last = encode_events(self._last) if self._followers else b""
        for follower in self._followers:
            if last:
                follower.put(last)
            follower.end()
        self._followers.clear()

    def _events(self, delta: ChoiceDelta) -> list[Event]:
        events = self._start()
        for piece in delta.choice.sort(delta.text):
            events += self._builder.add(piece)
        return events

    def _start(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return self._builder.start()

    def _finish(self) -> list[Event]:
        used = self._answer.usage
        cached = used.cached_tokens or 0
        tokens = TokenCounts(used.prompt_tokens, used.completion_tokens, cached=cached, reasoning=used.reasoning_tokens)
        events = [*self._start(), *self._builder.finish(self._answer.choices[0].finish_reason, tokens)]
        self._settle()
        return events

    def _fail(self, error: ApiError) -> list[Event]:
        log_detail(error)
        events = [*self._start(), *self._builder.fail(error)]
        self._settle()
        return events

    # -- the end

    def _settle(self) -> None:
        self._closed = True
        self._unsaved = self.entry()

    def _stop(self) -> None:
        if self._closed:
            return
        self._builder.cancel()
        self._settle()
        if self._running is not None:
            self._running.soon(self._save())
        else:
            self._release()

    async def _save(self) -> bool:
        """Store the last state if there is one to store. Returns False if it could not be stored."""
        entry, self._unsaved = self._unsaved, None
        if entry is None:
            return True
        if self._conversation is not None:
            await asyncio.shield(self._added(self._conversation, entry))
        stored = self._running is None or await asyncio.shield(self._stored(self._running, entry))
        if not stored:
            for event in self._last:
                if "response" in event:
                    event["response"]["store"] = False
            self._builder.response["store"] = False
        self._release()
        return stored

    async def _added(self, add: Callable[[StoredResponse], Awaitable[None]], entry: StoredResponse) -> None:
        try:
            await add(entry)
        except ApiError as error:
            log.warning("Response %s was not added to its conversation: %s", self.id, error.full_message)

    async def _stored(self, running: RunningResponses, entry: StoredResponse) -> bool:
        row, limit = entry.to_row(), running.store.limits.item_bytes
        try:
            if row.size > limit:
                log.warning("Response %s was not stored: it has %d bytes, and at most %d are", row.id, row.size, limit)
                return False
            await running.store.put(row, new=not self._announced)
        except ApiError as error:
            log.warning("Response %s was not stored: %s", row.id, error.full_message)
            return False
        finally:
            running.remove(self)
        return True
