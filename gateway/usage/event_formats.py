"""The two formats of a usage event: a row of the outbox and a CloudEvent.

The CloudEvents are version 1.0 in structured JSON (https://github.com/cloudevents/spec).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID
from zlib import crc32

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json

from llmops.gateway.interfaces import UsageEvent

TYPE = "llmops.usage.v1"
SOURCE = "gateway/"
_AT = UsageEvent._fields.index("at")
#: Fields of an event that a CloudEvent carries outside `data`.
_ENVELOPE_FIELDS = ("id", "gateway_id", "at", "tenant_id")
_DATA_FIELDS = [name for name in UsageEvent._fields if name not in _ENVELOPE_FIELDS]
_data_values = itemgetter(*map(UsageEvent._fields.index, _DATA_FIELDS))
_FIELDS = frozenset((*UsageEvent._fields, "source", "type", "time", "subject", "data"))
#: Version and variant bits of a UUID of version 7 (RFC 9562, section 5.7), each in its 64-bit half.
_VERSION, _VARIANT = 7 << 12, 2 << 62


#: Maximum cost of one request in micro-dollars: a million dollars. Sums of such costs stay far
#: below 2**63, the largest integer of a database.
MAX_COST_MICROS = 10**12
#: Largest integer that JSON readers represent exactly.
_MAX_JSON_INTEGER = 2**53 - 1
_Count = Annotated[int, Field(ge=0, le=_MAX_JSON_INTEGER)]
_Small = Annotated[int, Field(ge=0, le=32_767)]
_Text = Annotated[str, Field(max_length=1024)]


def _billable_time(at: datetime) -> datetime:
    """Return `at` if a request of this time can be billed.

    The time needs a time zone, and a year that every part of a bill can represent.

    Raises:
        ValueError: The time cannot be billed.
    """
    if at.tzinfo is None or not 1970 < at.year < 2200:
        raise ValueError("the time has no zone, or is outside the years 1971 to 2199")
    return at


class _Data(BaseModel):
    """The fields of a usage event in the `data` of a CloudEvent. Unknown fields are ignored."""

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
    """Return a new UUID of version 7 as two numbers, each of at most 63 bits."""
    bits = random.getrandbits(74)
    return time.time_ns() // 1_000_000 << 16 | _VERSION | bits >> 62, bits & (1 << 62) - 1


def format_event_id(high: int, low: int) -> str:
    """Return the text form of a UUID that `new_event_id` returned as two numbers."""
    digits = (high << 64 | _VARIANT | low).to_bytes(16, "big").hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def parse_event_id(text: str) -> tuple[int, int]:
    """Return an event id in text form as two numbers.

    Raises:
        ValueError: The text is not a UUID.
    """
    number = UUID(text).int
    return number >> 64, number & (1 << 62) - 1


class EncodedEvent(NamedTuple):
    """An event as the outbox stores it: its id, a CRC-32, and its values as a JSON list."""

    id: str
    checksum: int
    body: bytes


def encode_event(event: UsageEvent) -> EncodedEvent:
    """Return the event in the format of the outbox."""
    body = _to_json(list, event)
    return EncodedEvent(event.id, crc32(body), body)


def decode_event(encoded: EncodedEvent) -> UsageEvent:
    """Return the event of an outbox row. Values that a newer version appended are ignored.

    Raises:
        ValueError: The row is damaged: its checksum, its id or the type of a value does not match.
    """
    if crc32(encoded.body) != encoded.checksum:
        raise ValueError("the checksum does not match")
    try:
        values = from_json(encoded.body)[: len(UsageEvent._fields)]
        values[_AT] = datetime.fromisoformat(values[_AT])
        event = UsageEvent(*values)
    except (TypeError, IndexError) as error:
        raise ValueError("the values are not an event") from error
    if event.id != encoded.id:
        raise ValueError("the event has another id")
    return event


def to_cloud_event(event: UsageEvent) -> bytes:
    """Return the event as a CloudEvent in structured JSON."""
    return _to_json(_cloud_fields, event)


def from_cloud_event(message: bytes) -> UsageEvent:
    """Return the event that a CloudEvent in JSON describes.

    Raises:
        ValueError: The message is not a usage event, or a field has a wrong type or is out of
            range. The text names the field and contains nothing from the message.
    """
    try:
        found = _CloudEvent.model_validate_json(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Only names of known fields: another name would put text of the message into the error.
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part in _FIELDS)
        raise ValueError(f"{place or 'the event'}: {first['type'].replace('_', ' ')}") from None
    return UsageEvent(
        id=str(found.id),
        gateway_id=found.source.removeprefix(SOURCE),
        at=found.time,
        tenant_id=found.subject,
        **dict(found.data),
    )


def _cloud_fields(event: UsageEvent) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": event.id,
        "source": SOURCE + event.gateway_id,
        "type": TYPE,
        "time": event.at.astimezone(UTC),
        "subject": event.tenant_id,
        "datacontenttype": "application/json",
        "data": dict(zip(_DATA_FIELDS, _data_values(event), strict=True)),
    }


def _to_json(form: Callable[[UsageEvent], Any], event: UsageEvent) -> bytes:
    try:
        return to_json(form(event))
    except PydanticSerializationError:
        # Replace halves of surrogate pairs, which a text may contain and UTF-8 cannot encode.
        values = (value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in event)
        return to_json(form(UsageEvent._make(values)))
