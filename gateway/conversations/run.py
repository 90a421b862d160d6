"""One response being generated: the answer's text becomes items and events, and the store knows of it."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from llmops.gateway.answers.answer import Answer, Delta
from llmops.gateway.answers.events import AnswerEvents
from llmops.gateway.conversations.builder import Event, ResponseBuilder, TokenCounts, replay
from llmops.gateway.conversations.events import Followed, written
from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.store import ResponseStore, StoredResponse
from llmops.gateway.errors import ApiError, CancelledStreamError, InternalError, log_detail
from llmops.gateway.http.context import RequestContext

log = logging.getLogger(__name__)


class Running:
    """The responses that this worker is generating, by id; finished ones are in the store."""

    def __init__(self, worker: str, store: ResponseStore) -> None:
        self.worker = worker
        self.store = store
        self._runs: dict[str, ResponseRun] = {}

    def find(self, response_id: str, owner: str) -> ResponseRun | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.owner == owner else None

    def begin(self, run: ResponseRun) -> Future[None]:
        """Once this returns, every worker can find it."""
        self._runs[run.id] = run
        return self.store.put_soon(run.entry(self.worker))

    def end(self, run: ResponseRun) -> None:
        self._runs.pop(run.id, None)


class ResponseRun(AnswerEvents):
    """Streams the events, is collected, or runs in the background, and others may follow.

    However it ends, the store gets the last state before the client does. Without `running` nothing is stored.
    """

    def __init__(
        self, answer: Answer, builder: ResponseBuilder, items: list[Item], owner: str, running: Running | None
    ) -> None:
        super().__init__(answer)
        self.owner = owner
        self._builder, self._items, self._running = builder, items, running
        self._begun = self._closed = self._shown = False
        self._unsaved: StoredResponse | None = None
        self._followers: list[Followed] = []
        self._last = b""
        self._known: Future[None] | None = None

    @property
    def id(self) -> str:
        return self._builder.id

    def begin(self) -> ResponseRun:
        """Let others find it while it runs; without this only its end is stored."""
        self._shown = True
        if self._running is not None:
            self._known = self._running.begin(self)
        return self

    async def known(self) -> None:
        """Wait until every worker can find it."""
        known, self._known = self._known, None
        if known is not None:
            await asyncio.wrap_future(known)

    def entry(self, worker: str | None = None) -> StoredResponse:
        """The state now, as it is stored; later deltas do not change it."""
        cuts = [list(sizes) for sizes in self._builder.cuts]
        return StoredResponse(self.owner, self._builder.so_far(), self._items, cuts, worker)

    def follow(self, after: int = -1) -> Followed:
        """A second reader: what was sent after event `after`, then what comes."""
        past = replay(self._builder.so_far(), self._builder.cuts) if self._begun else []
        follower = Followed(written(event for event in past if event["sequence_number"] > after))
        if self._closed:
            follower.end()
        else:
            self._followers.append(follower)
        return follower

    # -- as an event source ----------------------------------------------------------------------------------------

    async def start(self, context: RequestContext) -> None:
        await super().start(context)
        self.begin()

    def late(self, error: Exception) -> None:
        super().late(error)
        self._shown = True

    async def next(self) -> bytes | None:
        await self.known()
        data = await super().next()
        await self._save()
        return data

    def render(self, delta: Delta) -> bytes:
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

    # -- without a stream ------------------------------------------------------------------------------------------

    async def collect(self) -> dict[str, object]:
        """The whole response. Raises the engine's errors."""
        (choice,) = self._answer.choices
        try:
            while (delta := await self._answer.next()) is not None:
                if delta.choice is not choice:
                    choice = delta.choice
                    self._builder.begin_anew()
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
        try:
            await self._answer.start()
            await self.collect()
        except ApiError as error:
            self._give_up(error)
        except Exception:
            log.exception("response %s failed", self.id)
            self._give_up(InternalError("The gateway failed in the middle of the response."))
        finally:
            await self._save()
            self.close()

    def _give_up(self, error: ApiError) -> None:
        log_detail(error)
        log.info("response %s ended early: %s", self.id, error.message)
        if not self._closed:
            self._publish(self._fail(error))

    # -- events ----------------------------------------------------------------------------------------------------

    def _published(self, events: list[Event]) -> bytes:
        data = written(events)
        if self._closed:
            self._last = data  # followers may have it when the response is stored
        else:
            for follower in self._followers:
                follower.put(data)
        return data

    def _publish(self, events: list[Event]) -> None:
        """The same when nobody is waiting for the bytes."""
        if self._followers:
            self._published(events)

    def _release(self, last: bytes) -> None:
        for follower in self._followers:
            follower.put(last)
            follower.end()
        self._followers.clear()

    def _events(self, delta: Delta) -> list[Event]:
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

    # -- the end ---------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._closed = True
        self._unsaved = self.entry()

    def _stop(self) -> None:
        if self._closed:
            return
        self._builder.cancel()
        self._settle()
        if self._running is not None and self._unsaved is not None:
            self._running.store.put_soon(self._unsaved)
            self._running.end(self)
        self._unsaved = None
        self._release(b"")

    async def _save(self) -> None:
        entry, self._unsaved = self._unsaved, None
        if entry is None:
            return
        if self._running is not None:
            await asyncio.shield(self._running.store.put(entry))
            self._running.end(self)
        self._release(self._last)
