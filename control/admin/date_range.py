"""The days that a question about usage is about."""

from __future__ import annotations

from datetime import UTC, date, datetime

from llmops.control.admin.schemas import DateRange
from llmops.errors import InputError


def resolve_date_range(first: date | None, last: date | None, now: datetime) -> DateRange:
    """From the first of the month to today, unless said otherwise. Raises InputError where it ends before it begins."""
    today = now.astimezone(UTC).date()
    last = last or max(today, first or today)
    first = first or last.replace(day=1)
    if first > last:
        raise InputError(f"A period from {first} to {last} ends before it begins; swap the two days.")
    return DateRange(first=first, last=last)
