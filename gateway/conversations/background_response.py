"""Responses in the background, which run on without a reader.

With Redis, a response in the background also survives the loss of its gateway. Any gateway can make
the response and its events from the log of the answer's deltas.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel

from llmops.gateway.conversations.answer_run import FLUSH_EVENTS, AnswerReader, AnswerRun
from llmops.gateway.conversations.chat_run import ChatRun
from llmops.gateway.conversations.event_replay import FLUSH_BYTES, encode_events
from llmops.gateway.conversations.items import Item
from llmops.gateway.conversations.response_builder import Event, ResponseBuilder
from llmops.gateway.conversations.response_run import ResponseSaver
from llmops.gateway.conversations.response_store import StoredResponse
from llmops.gateway.interfaces import FinishReason
from llmops.gateway.logging_setup import request_logger

log = request_logger(__name__)


class BackgroundFormat(BaseModel):
    """The form of a background response's events.

    Attributes:
        response: The response without output.
        items: The input items.
        origins: The fields `name` and `namespace` of functions in namespaces, by the name that the
            model uses.
    """

    response: dict[str, Any]
    items: list[Item]
    origins: dict[str, dict[str, str]] = {}

    def builder(self) -> ResponseBuilder:
        """Return a new builder of the response, without output."""
        # The builder changes fields of the response, and no values of the fields but `output`.
        return ResponseBuilder({**self.response, "output": []}, self.origins)

    def read(self, run: AnswerRun, after: int) -> BackgroundReader:
        """Return a reader of the events whose sequence number is greater than `after`."""
        return BackgroundReader(run, self.builder(), after)

    def present(self, run: AnswerRun) -> dict[str, Any]:
        """Return the current state of the response."""
        builder = self.builder()
        for piece in run.log.pieces():
            builder.add(piece)
        _end(builder, run)
        return builder.so_far()


class BackgroundReader(AnswerReader):
    """A reader of a background response's events after a given sequence number.

    Each reader has its own builder, which makes the events again.
    """

    def __init__(self, run: AnswerRun, builder: ResponseBuilder, after: int) -> None:
        super().__init__(run, None, -1)
        self._builder, self._after = builder, after

    def _rendered(self) -> bytes:
        run, parts, size = self._run, [], 0
        if self._event == 0 and run.visible >= 0:
            parts.append(self._new(self._builder.start()))
            self._event = 1
        while 0 < self._event <= run.visible and size < FLUSH_BYTES and len(parts) < FLUSH_EVENTS:
            piece, self._offset = run.log.piece(self._event - 1, self._offset)
            parts.append(self._new(self._builder.add(piece)))
            size += len(parts[-1])
            self._event += 1
        return b"".join(parts)

    def _last(self) -> bytes | None:
        return self._new(_end(self._builder, self._run)) or None

    def _new(self, events: list[Event]) -> bytes:
        return encode_events(event for event in events if event["sequence_number"] > self._after)


class BackgroundSaver:
    """A writer of one response's states to the store, in which every gateway can read them."""

    def __init__(self, owner: str, form: BackgroundFormat, saver: ResponseSaver, taken_over: bool = False) -> None:
        """Create the writer of one response.

        Args:
            owner: The owner of the response.
            form: The form of the response's events.
            saver: The writer of the response's end.
            taken_over: True if another gateway began the response.
        """
        assert saver.store is not None
        self._owner, self._form, self._saver, self._store = owner, form, saver, saver.store
        # A store in memory is lost with its gateway, so a response that was taken over must be
        # inserted again.
        self._new = taken_over and not saver.store.shared
        self._builder = form.builder()
        self._delta = self._offset = 0
        # The latest state that is not too large for the store.
        self._fitting = self._entry(running=True).to_row(group=saver.group)

    async def announce(self) -> None:
        """Store that the response is being generated.

        Raises:
            UnavailableError: The store is unavailable.
        """
        await self._store.put(self._fitting)

    async def save(self, run: ChatRun) -> bool:
        """Store the current state, and stop a response that another gateway cancelled or deleted.

        Return False if the response has ended and could not be stored whole.
        """
        while self._delta < len(run.log):
            piece, self._offset = run.log.piece(self._delta, self._offset)
            self._builder.add(piece)
            self._delta += 1
        if run.finish is not None:
            _end(self._builder, run, stored=True)
            entry = self._entry(running=False)
            saved = await self._saver.try_save(entry, self._new)
            if not saved and (excess := self._store.excess(entry.to_row())):
                await self._store.put(self._cut(entry, excess).to_row(group=self._saver.group), self._new)
            if self._form.response.get("conversation"):
                # The last event that readers see names the conversation, or None if the response
                # was not added.
                self._form.response["conversation"] = entry.response["conversation"]
            return saved
        if not self._store.shared:
            return True
        row = self._entry(running=True).to_row()
        if not self._store.excess(row):
            self._fitting = row
        if not await self._store.put(self._fitting, new=False):
            if await self._store.find(run.id, self._owner) is None:
                log.info("The response %s ends: a client deleted it, or its row in the store is lost.", run.id)
                run.discard()
            run.answer.cancel()
        return True

    def _cut(self, entry: StoredResponse, excess: str) -> StoredResponse:
        """Return an ended response that is too large for the store, with the output that fits.

        `excess` states the size and the limit, for the error message.
        """
        kept = self._fitting.decoded()
        kept.response, kept.running = {**entry.response, "output": kept.response["output"]}, False
        if entry.response["status"] in ("completed", "incomplete"):
            kept.fail(
                f"The response is too large to be stored, so at most its beginning is: it has {excess}. Ask for a "
                "shorter answer, leave out background, or have the setting raised."
            )
        return kept

    def _entry(self, running: bool) -> StoredResponse:
        cuts = [list(sizes) for sizes in self._builder.cuts]
        return StoredResponse(self._owner, self._builder.so_far(), self._form.items, cuts, running)


def _end(builder: ResponseBuilder, run: AnswerRun, stored: bool | None = None) -> list[Event]:
    """End the response if the answer has ended, and return the last events.

    Args:
        builder: The builder of the response.
        run: The answer.
        stored: True if the response is stored; None to use `run.saved`, which is set later.
    """
    if run.finish is None:
        return []
    builder.response["store"] = run.saved if stored is None else stored
    if "conversation" in builder.response and isinstance(run.format, BackgroundFormat):
        builder.response["conversation"] = run.format.response["conversation"]
    if run.error is not None:
        return builder.fail(run.error)
    if run.finish == "cancelled":
        builder.cancel()
        return []
    return builder.finish(cast(FinishReason, run.finish), run.usage, run.ended_at)
