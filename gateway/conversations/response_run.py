"""One response that is generated while its client waits.

The text of the answer becomes items and events, and the result is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from llmops.background import TaskSet
from llmops.clocks import utc_now
from llmops.gateway.conversations.event_replay import encode_events
from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.response_builder import Event, ResponseBuilder
from llmops.gateway.conversations.response_store import ResponseStore, StoredResponse
from llmops.gateway.errors import ApiError, CancelledStreamError, UnavailableError, log_detail
from llmops.gateway.generation.answer import Answer, ChoiceDelta
from llmops.gateway.generation.answer_events import AnswerEvents
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.logging_setup import request_logger

log = request_logger(__name__)


class ResponseSaver:
    """A writer of one response's end to the store, and to the response's conversation, if any."""

    def __init__(
        self, store: ResponseStore | None, add: Callable[[StoredResponse], Awaitable[None]] | None, group: str
    ) -> None:
        """Create the writer.

        Args:
            store: The store; None for a response that is not stored.
            add: Adds a response to its conversation; None for a response without a conversation.
            group: The owner's `Caller.group`.
        """
        self.store, self._add, self._began, self.group = store, add, utc_now(), group

    async def save(self, entry: StoredResponse) -> bool:
        """Store an ended response. Return False on failure."""
        try:
            return await self.try_save(entry)
        except ApiError as error:
            log.warning(
                "Response %s was not stored, so later requests cannot refer to it: %s", entry.id, error.full_message
            )
            # A response that is not stored is not added to its conversation either.
            if self._add is not None:
                entry.response["conversation"] = None
            return False

    async def try_save(self, entry: StoredResponse, new: bool = True) -> bool:
        """Store an ended response. Return False if it is too large or was deleted in the meantime.

        If the response cannot be added to its conversation, its field `conversation` becomes None.

        Args:
            entry: The response.
            new: True to insert the response if it is not stored yet; False to only replace a stored
                response.

        Raises:
            UnavailableError: The store is unavailable.
        """
        if self._add is not None:
            try:
                await self._add(entry)
            except UnavailableError:
                raise
            except ApiError as error:
                log.warning("Response %s was not added to its conversation: %s", entry.id, error.full_message)
                entry.response["conversation"] = None
            self._add = None
        if self.store is None:
            return True
        row = entry.to_row(self._began if new else None, self.group)
        if excess := self.store.excess(row):
            log.warning("Response %s was not stored: it has %s.", row.id, excess)
            return False
        return await self.store.put(row, new=new)


class ResponseRun(AnswerEvents):
    """One response, which is streamed to its client or collected.

    The response is stored before the client sees its end, however the response ends. If storing
    fails, the last state has `"store": false`, and `"conversation": null` if the response could not
    be added to its conversation.
    """

    def __init__(
        self,
        answer: Answer,
        builder: ResponseBuilder,
        items: list[Item],
        owner: str,
        saver: ResponseSaver,
        tasks: TaskSet,
    ) -> None:
        """Prepare the run of an answer.

        Args:
            answer: The answer.
            builder: The builder of the response.
            items: The input items of the response.
            owner: The owner of the response.
            saver: The writer of the response's end.
            tasks: The set of tasks that the gateway waits for at shutdown.
        """
        super().__init__(answer)
        self._builder, self._items, self._owner = builder, items, owner
        self._saver, self._tasks = saver, tasks
        self._begun = self._closed = self._shown = False
        self._unsaved: StoredResponse | None = None
        self._last: list[Event] = []

    # -- as an event source

    async def start(self, context: RequestContext) -> None:
        await super().start(context)
        self._shown = True

    def start_failed(self, error: Exception) -> None:
        super().start_failed(error)
        self._shown = True

    async def next(self) -> bytes | None:
        data = await super().next()
        return data if await self._save() else encode_events(self._last)

    def render(self, delta: ChoiceDelta) -> bytes:
        return encode_events(self._events(delta))

    def end(self) -> bytes:
        return encode_events(self._finish())

    def failed(self, error: ApiError) -> bytes:
        return encode_events(self._fail(error))

    def cancel(self) -> None:
        super().cancel()
        self._stop()

    def close(self) -> None:
        super().close()
        if self._shown:
            self._stop()  # The client disconnected before the end.

    # -- without a stream

    async def collect(self) -> dict[str, object]:
        """Return the whole response.

        Errors of the engine are raised as they are.
        """
        (choice,) = self._answer.choices
        try:
            while (delta := await self._answer.next()) is not None:
                if delta.choice is not choice:
                    choice = delta.choice
                    self._builder.restart()
                self._events(delta)
        except CancelledStreamError:
            raise
        except ApiError as error:
            self._fail(error)
            await self._save()
            raise
        self._finish()
        await self._save()
        return self._builder.response

    # -- events

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
        reason, usage = self._answer.choices[0].finish_reason, self._answer.usage
        return self._settle([*self._start(), *self._builder.finish(reason, usage)])

    def _fail(self, error: ApiError) -> list[Event]:
        log_detail(error)
        return self._settle([*self._start(), *self._builder.fail(error.body()["error"])])

    # -- the end

    def _settle(self, last: list[Event]) -> list[Event]:
        self._closed, self._last = True, last
        cuts = [list(sizes) for sizes in self._builder.cuts]
        self._unsaved = StoredResponse(self._owner, self._builder.so_far(), self._items, cuts)
        return last

    def _stop(self) -> None:
        if not self._closed:
            self._builder.cancel()
            self._settle([])
            self._tasks.start(self._save(), "response")

    async def _save(self) -> bool:
        """Store the last state, if the response is to be stored.

        Return False if storing failed, which changed the state.
        """
        entry, self._unsaved = self._unsaved, None
        if entry is None:
            return True
        changes: dict[str, bool | None] = {} if await asyncio.shield(self._saver.save(entry)) else {"store": False}
        if self._builder.response.get("conversation") and not entry.response["conversation"]:
            changes["conversation"] = None
        for response in (self._builder.response, *(event.get("response", {}) for event in self._last)):
            response.update(changes)
        return not changes
