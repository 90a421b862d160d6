"""The forms of an event: a line of a journal, and a CloudEvent (https://github.com/cloudevents/spec, 1.0)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import datetime, timezone
from operator import itemgetter
from typing import Any
from uuid import UUID
from zlib import crc32

from pydantic_core import PydanticSerializationError, from_json, to_json

from llmops.gateway.messages import UsageEvent

TYPE = "llmops.usage.v1"
SOURCE = "gateway/"
_AT = UsageEvent._fields.index("at")
_KNOWN = frozenset(UsageEvent._fields)
# what CloudEvents have a place of their own for
_OUTSIDE = ("id", "gateway_id", "at", "tenant_id")
_INSIDE = [name for name in UsageEvent._fields if name not in _OUTSIDE]
_inside = itemgetter(*map(UsageEvent._fields.index, _INSIDE))
# bits: 12 of random beside the time, 62 after it (RFC 9562, 5.7)
_VERSION, _VARIANT = 7 << 12, 2 << 62


def new_id() -> tuple[int, int]:
    """A UUID of version 7 in two numbers, each of less than 63 bits."""
    bits = random.getrandbits(74)
    return time.time_ns() // 1_000_000 << 16 | _VERSION | bits >> 62, bits & (1 << 62) - 1


def id_text(high: int, low: int) -> str:
    digits = (high << 64 | _VARIANT | low).to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def line_of(event: UsageEvent) -> bytes:
    """A list of its values behind a checksum; a line break is only at the end."""
    text = _json(list, event)
    return b"%08x %b\n" % (crc32(text), text)


def event_of(line: bytes) -> UsageEvent:
    """Raises ValueError for what is not a whole line. Values that a newer version added are left out."""
    checksum, text = line[:8], line[9:-1]
    if len(line) < 10 or line[-1:] != b"\n" or checksum != b"%08x" % crc32(text):
        raise ValueError("not a whole line")
    values = from_json(text)[: len(UsageEvent._fields)]
    values[_AT] = _moment(values[_AT])
    return UsageEvent(*values)


def cloud_event(event: UsageEvent) -> bytes:
    """In the structured JSON form."""
    return _json(_cloud, event)


def from_cloud_event(message: bytes) -> UsageEvent:
    """Raises ValueError for what is not one of usage."""
    try:
        found = from_json(message)
        source, kind = found["source"], found["type"]
        if kind != TYPE or not source.startswith(SOURCE):
            raise ValueError(f"an event of type {kind} from {source}")
        outside = {
            "id": str(UUID(found["id"])),
            "gateway_id": source.removeprefix(SOURCE),
            "at": _moment(found["time"]),
            "tenant_id": found.get("subject", ""),
        }
        return UsageEvent(**{name: value for name, value in {**found["data"], **outside}.items() if name in _KNOWN})
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not an event of usage ({type(error).__name__}: {error})") from error


def _cloud(event: UsageEvent) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": SOURCE + event.gateway_id,
        "type": TYPE,
        "time": event.at.astimezone(timezone.utc),
        "subject": event.tenant_id,
        "datacontenttype": "application/json",
        "data": dict(zip(_INSIDE, _inside(event), strict=True)),
    }


def _json(form: Callable[[UsageEvent], Any], event: UsageEvent) -> bytes:
    try:
        return to_json(form(event))
    except PydanticSerializationError:
        # half of a surrogate pair, which a text may hold and UTF-8 may not
        values = (one.encode("utf-8", "replace").decode() if isinstance(one, str) else one for one in event)
        return to_json(form(UsageEvent._make(values)))


def _moment(text: str) -> datetime:
    # Python 3.10 does not know the Z
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
