"""A workload hands out sessions; a session hands out requests, one after another."""

from __future__ import annotations

from typing import Protocol

from llmops.perf.records import Record, Request


class Session(Protocol):
    """One user: a single request, or a conversation whose next turn depends on the last answer."""

    def next(self, last: Record | None) -> Request | None:
        """The next request after `last` (None at first); None when the user is done."""
        ...


class Workload(Protocol):
    """An endless supply of sessions; the same index gives the same session in every run with the same seed."""

    def session(self, index: int) -> Session: ...


class SingleRequestSession:
    """A session of one request."""

    def __init__(self, request: Request) -> None:
        self._request: Request | None = request

    def next(self, last: Record | None) -> Request | None:
        request, self._request = self._request, None
        return request
