"""The trace context of a request (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import getrandbits
from time import perf_counter

TRACEPARENT = "traceparent"
_TRACEPARENT_BYTES = TRACEPARENT.encode()
# Format: version, trace id, span id, flags. Version ff and ids of zeros are invalid. Versions after
# 00 may append fields.
_TRACEPARENT_FORMAT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:(?<!^00.{53})-.*)?", re.DOTALL
)
_MAX_HEADER_LENGTH = 512
#: Maximum length of a span's path, in characters. Bounds the memory of spans that wait to be sent,
#: because clients choose the ids in a path.
MAX_PATH_LENGTH = 256
_TRACE_ID, _SPAN_ID, _SAMPLED = slice(3, 35), slice(36, 52), slice(54, 55)
# hexadecimal digits with the lowest bit set, which is the flag `sampled`
_SAMPLED_DIGITS = b"13579bdf"


def parse_traceparent(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the `traceparent` header, or b"" if it is missing, repeated or invalid."""
    given = b""
    for name, value in headers:
        if name == _TRACEPARENT_BYTES:
            if given:
                return b""
            given = value
    return given if given and len(given) <= _MAX_HEADER_LENGTH and _TRACEPARENT_FORMAT.fullmatch(given) else b""


class TraceContext:
    """The trace of a request that may be exported. Ids are hexadecimal.

    Attributes:
        parent: The client's `traceparent` header, or b"".
        chosen: True if the request is exported.
        call_id: Span id of the engine's work, empty if the request is not exported.
        marks: Names and times (perf_counter) of finished stages.
    """

    # Defaults are class attributes: most requests are not exported, and setting attributes of the
    # instance would double the cost of creating it.
    chosen = False
    call_id = _id = ""
    marks: tuple[tuple[str, float], ...] = ()

    def __init__(self, parent: bytes, scheme: str = "http", path: str = "") -> None:
        """Create the trace of a request.

        Args:
            parent: The client's `traceparent`, as `parse_traceparent` returned it.
            scheme: The scheme of the request's URL.
            path: The path of the request, which is cut to MAX_PATH_LENGTH.
        """
        self.parent, self.scheme, self.path = parent, scheme, path[:MAX_PATH_LENGTH]

    @property
    def trace_id(self) -> str:
        """Return the trace id, or "" if the request has no parent and is not exported."""
        return self.parent[_TRACE_ID].decode() or self._id

    @property
    def parent_id(self) -> str:
        return self.parent[_SPAN_ID].decode()

    @property
    def sampled(self) -> bool:
        """Return True if the client's header has the flag `sampled`."""
        return self.parent[_SAMPLED] in _SAMPLED_DIGITS if self.parent else False

    def passed(self, name: str) -> None:
        self.marks += ((name, perf_counter()),)

    def choose(self) -> None:
        """Mark the request for export and create the ids of its spans."""
        self.chosen = True
        self._id = f"{getrandbits(128) or 1:032x}"
        self.call_id = f"{getrandbits(64) or 1:016x}"

    @property
    def onward(self) -> str:
        """Return the `traceparent` for the engine's server, empty for a request without export."""
        return f"00-{self.trace_id}-{self.call_id}-01" if self.chosen else ""
