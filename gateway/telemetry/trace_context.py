"""Which trace a request belongs to: W3C's Trace Context, https://www.w3.org/TR/trace-context/, read and passed on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import getrandbits
from time import perf_counter

TRACEPARENT = "traceparent"
_TRACEPARENT_BYTES = TRACEPARENT.encode()
# version, trace, span, flags. ff is no version, and 0 no id; a later version than 00 may have more at its end
_TRACEPARENT_FORMAT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:(?<!^00.{53})-.*)?", re.DOTALL
)
_MAX_HEADER_LENGTH = 512
_TRACE_ID, _SPAN_ID, _SAMPLED = slice(3, 35), slice(36, 52), slice(54, 55)
# the flag is the lowest bit
_SAMPLED_DIGITS = b"13579bdf"


def parse_traceparent(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The one `traceparent`; empty without one, with several, or with one of another form."""
    given = b""
    for name, value in headers:
        if name == _TRACEPARENT_BYTES:
            if given:
                return b""
            given = value
    return given if given and len(given) <= _MAX_HEADER_LENGTH and _TRACEPARENT_FORMAT.fullmatch(given) else b""


class TraceContext:
    """What is noted of a request that may be traced. `marks`: what it passed, and when (perf_counter).

    `call_id`: the span of its engine's work, known before that begins. Ids are hexadecimal.
    """

    # of the class: most requests are not told, and to make less of them is half of what they cost
    chosen = False
    call_id = _id = ""
    marks: tuple[tuple[str, float], ...] = ()

    def __init__(self, parent: bytes) -> None:
        """`parent` is what `parse_traceparent` found."""
        self.parent = parent

    @property
    def trace_id(self) -> str:
        """Empty while nobody needs one."""
        return self.parent[_TRACE_ID].decode() or self._id

    @property
    def parent_id(self) -> str:
        return self.parent[_SPAN_ID].decode()

    @property
    def sampled(self) -> bool:
        """Whether the parent is told."""
        return self.parent[_SAMPLED] in _SAMPLED_DIGITS if self.parent else False

    def passed(self, name: str) -> None:
        self.marks += ((name, perf_counter()),)

    def choose(self) -> None:
        """It will be told."""
        self.chosen = True
        self._id = f"{getrandbits(128) or 1:032x}"
        self.call_id = f"{getrandbits(64) or 1:016x}"

    @property
    def onward(self) -> str:
        """The header for the engine's server; empty where nobody would look at what that told."""
        return f"00-{self.trace_id}-{self.call_id}-01" if self.chosen else ""
