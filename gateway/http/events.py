"""Answers as an event stream, written straight to the ASGI server: one coroutine per stream, one write per step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmops.gateway.http.direct import direct_send
from llmops.gateway.http.watch import ClientWatch


class EventSource(ABC):
    """What an EventStream sends."""

    @abstractmethod
    async def next(self) -> bytes | None:
        """The next events (may be empty), None at the end. Must not raise: failures are events too."""

    @abstractmethod
    def cancel(self) -> None:
        """The client is gone."""

    @abstractmethod
    def close(self) -> None:
        """Called once, always."""


class EventStream(Response):
    """A 200 whose body is an event stream. Make it only when the first event or an error is known."""

    media_type = "text/event-stream"

    def __init__(self, source: EventSource, watch: ClientWatch, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source = self._source
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            write = direct_send(scope, send)
            while (data := await source.next()) is not None:
                if data:
                    await write({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            source.close()
            self._watch.close()
