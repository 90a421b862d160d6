"""The forms of an event: a line of a journal, and a CloudEvent (https://github.com/cloudevents/spec, 1.0)."""

from __future__ import annotations

import json
import random
import time
from datetime import datetime, timezone
from uuid import UUID
from zlib import crc32

from llmops.gateway.messages import UsageEvent

TYPE = "llmops.usage.v1"
SOURCE = "gateway/"
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_AT = UsageEvent._fields.index("at")
_KNOWN = frozenset(UsageEvent._fields)
# what CloudEvents have a place of their own for
_OUTSIDE = ("id", "gateway_id", "at", "tenant_id")
# bits: 12 of random beside the time, 62 after it (RFC 9562, 5.7)
_VERSION, _VARIANT = 7 << 12, 2 << 62


def new_id() -> tuple[int, int]:
    """A UUID of version 7 in two numbers, each of less than 63 bits."""
    bits = random.getrandbits(74)
    return time.time_ns() // 1_000_000 << 16 | _VERSION | bits >> 62, bits & (1 << 62) - 1


def id_text(high: int, low: int) -> str:
    digits = f"{high:016x}{_VARIANT | low:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def line_of(event: UsageEvent) -> bytes:
    """A list of its values behind a checksum; a line break is only at the end."""
    text = _encode([*event[:_AT], event.at.isoformat(), *event[_AT + 1 :]]).encode("utf-8", "replace")
    return b"%08x %b\n" % (crc32(text), text)


def event_of(line: bytes) -> UsageEvent:
    """Raises ValueError for what is not a whole line. Values that a newer version added are left out."""
    checksum, text = line[:8], line[9:-1]
    if len(line) < 10 or line[-1:] != b"\n" or checksum != b"%08x" % crc32(text):
        raise ValueError("not a whole line")
    values = json.loads(text)[: len(UsageEvent._fields)]
    values[_AT] = datetime.fromisoformat(values[_AT])
    return UsageEvent(*values)


def cloud_event(event: UsageEvent) -> bytes:
    """In the structured JSON form."""
    data = {name: value for name, value in event._asdict().items() if name not in _OUTSIDE}
    return _encode(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": SOURCE + event.gateway_id,
            "type": TYPE,
            "time": event.at.astimezone(timezone.utc).isoformat().replace("+00:00", "Z"),
            "subject": event.tenant_id,
            "datacontenttype": "application/json",
            "data": data,
        }
    ).encode("utf-8", "replace")


def from_cloud_event(message: bytes) -> UsageEvent:
    """Raises ValueError for what is not one of usage."""
    try:
        found = json.loads(message)
        source, kind = found["source"], found["type"]
        if kind != TYPE or not source.startswith(SOURCE):
            raise ValueError(f"an event of type {kind} from {source}")
        outside = {
            "id": str(UUID(found["id"])),
            "gateway_id": source.removeprefix(SOURCE),
            "at": found["time"].replace("Z", "+00:00"),
            "tenant_id": found.get("subject", ""),
        }
        known = {name: value for name, value in {**found["data"], **outside}.items() if name in _KNOWN}
        return UsageEvent(**{**known, "at": datetime.fromisoformat(known["at"])})
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not an event of usage ({type(error).__name__}: {error})") from error
