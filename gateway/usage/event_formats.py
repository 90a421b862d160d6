"""The forms of an event: a line of a journal, and a CloudEvent (https://github.com/cloudevents/spec, 1.0)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from operator import itemgetter
from typing import Annotated, Any, Literal
from uuid import UUID
from zlib import crc32

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from llmops.gateway.interfaces import UsageEvent

TYPE = "llmops.usage.v1"
SOURCE = "gateway/"
_AT = UsageEvent._fields.index("at")
# what CloudEvents have a place of their own for
_OUTSIDE = ("id", "gateway_id", "at", "tenant_id")
_INSIDE = [name for name in UsageEvent._fields if name not in _OUTSIDE]
_inside = itemgetter(*map(UsageEvent._fields.index, _INSIDE))
_FIELDS = frozenset((*UsageEvent._fields, "source", "type", "time", "subject", "data"))
# bits: 12 of random beside the time, 62 after it (RFC 9562, 5.7)
_VERSION, _VARIANT = 7 << 12, 2 << 62


#: Micro-dollars that one request may cost: a million dollars. Sums of such costs stay far below 2**63.
MAX_COST_MICROS = 10**12
#: The largest number that JSON readers keep exact.
_MAX_JSON_INTEGER = 2**53 - 1
_Count = Annotated[int, Field(ge=0, le=_MAX_JSON_INTEGER)]
_Small = Annotated[int, Field(ge=0, le=32_767)]
_Text = Annotated[str, Field(max_length=1024)]


def _billable_time(at: datetime) -> datetime:
    """Return `at`, which has a time zone and a day that every part of a bill can write."""
    if at.tzinfo is None or not 1970 < at.year < 2200:
        raise ValueError("a time with a zone, from 1971 to 2199")
    return at


class _Data(BaseModel):
    """The fields inside a CloudEvent. Fields that a newer version added are left out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    seq: _Count
    request_id: _Text
    user_id: _Text
    key_id: _Text
    model: _Text
    input_tokens: _Count
    cached_tokens: _Count = 0
    output_tokens: _Count = 0
    reasoning_tokens: _Count = 0
    cost_micros: Annotated[int, Field(ge=0, le=MAX_COST_MICROS)] = 0
    price_id: _Text | None = None
    status: _Small = 200
    finish_reason: _Text | None = None
    ttft_ms: _Count | None = None
    latency_ms: _Count | None = None
    priority: _Text | None = None
    version: _Text | None = None
    replica: _Text | None = None
    migrations: _Small = 0


class _CloudEvent(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: UUID
    source: Annotated[str, Field(pattern=rf"^{SOURCE}[A-Za-z0-9._-]{{1,64}}$")]
    type: Literal["llmops.usage.v1"]
    time: Annotated[AwareDatetime, AfterValidator(_billable_time)]
    subject: Annotated[str, Field(max_length=255)] = ""
    data: _Data


def new_event_id() -> tuple[int, int]:
    """A UUID of version 7 in two numbers, each of less than 63 bits."""
    bits = random.getrandbits(74)
    return time.time_ns() // 1_000_000 << 16 | _VERSION | bits >> 62, bits & (1 << 62) - 1


def format_event_id(high: int, low: int) -> str:
    digits = (high << 64 | _VARIANT | low).to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def to_journal_line(event: UsageEvent) -> bytes:
    """A list of its values behind a checksum; a line break is only at the end."""
    text = _json(list, event)
    return b"%08x %b\n" % (crc32(text), text)


def from_journal_line(line: bytes) -> UsageEvent:
    """Raises ValueError for what is not a whole line. Values that a newer version added are left out."""
    checksum, text = line[:8], line[9:-1]
    if len(line) < 10 or line[-1:] != b"\n" or checksum != b"%08x" % crc32(text):
        raise ValueError("not a whole line")
    values = from_json(text)[: len(UsageEvent._fields)]
    values[_AT] = _parse_time(values[_AT])
    return UsageEvent(*values)


def to_cloud_event(event: UsageEvent) -> bytes:
    """In the structured JSON form."""
    return _json(_cloud, event)


def from_cloud_event(message: bytes) -> UsageEvent:
    """Return the event that a CloudEvent in JSON describes.

    Raises:
        ValueError: The message is no event of usage, or a field has another type or is out of range. The text names
            the field and holds nothing of what the message says.
    """
    try:
        found = _CloudEvent.model_validate_json(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # the names of fields are ours, except where the message has another shape
        place = ".".join(str(one) for one in first["loc"] if isinstance(one, int) or one in _FIELDS)
        raise ValueError(f"{place or 'the event'}: {first['type'].replace('_', ' ')}") from None
    return UsageEvent(
        id=str(found.id),
        gateway_id=found.source.removeprefix(SOURCE),
        at=found.time,
        tenant_id=found.subject,
        **dict(found.data),
    )


def _cloud(event: UsageEvent) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": SOURCE + event.gateway_id,
        "type": TYPE,
        "time": event.at.astimezone(UTC),
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


def _parse_time(text: str) -> datetime:
    # Python 3.10 does not know the Z
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
