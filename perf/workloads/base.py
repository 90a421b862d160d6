"""The interface of workloads and sessions, and definitions of tools.

A workload yields sessions, and a session yields requests.
"""

from typing import Any, Protocol

from llmops.perf.records import Record, Request


class Session(Protocol):
    """A single request, or a conversation whose next turn depends on the last answer."""

    def next(self, last: Record | None) -> Request | None:
        """Return the next request, or None if the session is over.

        Args:
            last: The record of the session's last request, or None at first.
        """
        ...


class Workload(Protocol):
    """An endless source of sessions.

    An index gives the same session in every run with the same seed.
    """

    def session(self, index: int) -> Session: ...


class SingleRequestSession:
    """A session of one request."""

    def __init__(self, request: Request) -> None:
        self._request: Request | None = request

    def next(self, last: Record | None) -> Request | None:
        request, self._request = self._request, None
        return request


_SUBJECTS = ("weather", "time", "population", "exchange_rate", "flight", "hotel", "news", "stock_price")


def tool_definitions(count: int) -> list[dict[str, Any]]:
    """Return `count` function tools in OpenAI's format, of the same shape and size."""
    return [_tool(index) for index in range(count)]


def _tool(index: int) -> dict[str, Any]:
    subject = _SUBJECTS[index % len(_SUBJECTS)]
    suffix = "" if index < len(_SUBJECTS) else f"_{index // len(_SUBJECTS)}"
    parameters = {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "City and country"},
            "unit": {"type": "string", "enum": ["metric", "imperial"]},
        },
        "required": ["place"],
    }
    description = f"Get the current {subject.replace('_', ' ')} of a place"
    return {
        "type": "function",
        "function": {"name": f"get_{subject}{suffix}", "description": description, "parameters": parameters},
    }
