"""The trace of a request by W3C's Trace Context (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import getrandbits
from time import perf_counter

TRACEPARENT = "traceparent"
_TRACEPARENT_BYTES = TRACEPARENT.encode()
# version, trace, span, flags; ff is no version and 0 no id; versions after 00 may have more fields
_TRACEPARENT_FORMAT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:(?<!^00.{53})-.*)?", re.DOTALL
)
_MAX_HEADER_LENGTH = 512
_TRACE_ID, _SPAN_ID, _SAMPLED = slice(3, 35), slice(36, 52), slice(54, 55)
# digits with the lowest bit set, which is the flag
_SAMPLED_DIGITS = b"13579bdf"


def parse_traceparent(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the `traceparent` header; empty if there is none, more than one, or an invalid one."""
    given = b""
    for name, value in headers:
        if name == _TRACEPARENT_BYTES:
            if given:
                return b""
            given = value
    return given if given and len(given) <= _MAX_HEADER_LENGTH and _TRACEPARENT_FORMAT.fullmatch(given) else b""


class TraceContext:
    """The trace of a request that may be exported. Ids are hexadecimal.

    `marks` are the names and times (perf_counter) of finished stages, `call_id` is the span of the
    engine's work.
    """

    # attributes of the class: most requests are not exported, and setting these is half of their
    # cost
    chosen = False
    call_id = _id = ""
    marks: tuple[tuple[str, float], ...] = ()

    def __init__(self, parent: bytes) -> None:
        """Create the trace of a request. `parent` is the result of `parse_traceparent`."""
        self.parent = parent

    @property
    def trace_id(self) -> str:
        """Return the id of the trace; empty for a request without a parent that is not exported."""
        return self.parent[_TRACE_ID].decode() or self._id

    @property
    def parent_id(self) -> str:
        return self.parent[_SPAN_ID].decode()

    @property
    def sampled(self) -> bool:
        """Return True if the caller samples the trace."""
        return self.parent[_SAMPLED] in _SAMPLED_DIGITS if self.parent else False

    def passed(self, name: str) -> None:
        self.marks += ((name, perf_counter()),)

    def choose(self) -> None:
        """Export the request: give its spans ids."""
        self.chosen = True
        self._id = f"{getrandbits(128) or 1:032x}"
        self.call_id = f"{getrandbits(64) or 1:016x}"

    @property
    def onward(self) -> str:
        """Return the header for the engine's server; empty for a request that is not exported."""
        return f"00-{self.trace_id}-{self.call_id}-01" if self.chosen else ""
