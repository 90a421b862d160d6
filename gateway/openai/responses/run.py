"""One response being generated: the answer's text becomes items and events, and the store knows of it."""

from __future__ import annotations

import json

from llmops.gateway.errors import ApiError, CancelledStreamError
from llmops.gateway.openai.answer import Advance, Answer
from llmops.gateway.openai.endpoints.common import AnswerEvents
from llmops.gateway.openai.responses.builder import Event, ResponseBuilder, TokenCounts
from llmops.gateway.openai.responses.items import Item
from llmops.gateway.openai.responses.store import ResponseStore, StoredResponse


class ResponseRun(AnswerEvents):
    """Streams the events, or is collected. However it ends, the store has the last state of the response."""

    def __init__(
        self, answer: Answer, builder: ResponseBuilder, items: list[Item], store: ResponseStore | None, owner: str
    ) -> None:
        super().__init__(answer)
        self._builder, self._items, self._store, self._owner = builder, items, store, owner
        self._begun = self._closed = False
        self._keep(running=True)

    def render(self, advance: Advance) -> bytes:
        return _written(self._events(advance))

    def end(self) -> bytes:
        events = self._finish()
        self._keep()
        return _written(events)

    def failed(self, error: ApiError) -> bytes:
        events = self._builder.fail(error)
        self._keep()
        return _written([*self._start(), *events])

    def cancel(self) -> None:
        super().cancel()
        self._stop()

    def close(self) -> None:
        super().close()
        if not self._closed:  # the client went away before the end
            self._stop()

    async def collect(self) -> dict[str, object]:
        """The whole response. Raises what the engine fails on."""
        try:
            while (advance := await self._answer.next()) is not None:
                self._events(advance)
        except CancelledStreamError:
            if self._builder.response["status"] != "cancelled":
                raise
            return self._builder.response
        except ApiError as error:
            self._builder.fail(error)
            self._keep()
            raise
        self._finish()
        self._keep()
        return self._builder.response

    def _events(self, advance: Advance) -> list[Event]:
        events = self._start()
        for piece in advance.choice.sort(advance.text):
            events += self._builder.add(piece)
        return events

    def _start(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return self._builder.start()

    def _finish(self) -> list[Event]:
        answer = self._answer
        tokens = TokenCounts(
            input=answer.prompt_tokens, output=answer.completion_tokens, reasoning=answer.reasoning_tokens
        )
        return [*self._start(), *self._builder.finish(answer.choices[0].finish_reason, tokens)]

    def _stop(self) -> None:
        if not self._closed:
            self._builder.cancel()
            self._keep()

    def _keep(self, running: bool = False) -> None:
        self._closed = not running
        if self._store is not None:
            cancel = self.cancel if running else None
            self._store.put(StoredResponse(self._owner, self._builder.response, self._items, cancel))


def _written(events: list[Event]) -> bytes:
    """Server-sent events with their type as the event's name, as OpenAI sends them."""
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(
            "utf-8", "replace"
        )
        for event in events
    )
