"""The days that a question about usage is about."""

from __future__ import annotations

from datetime import date, datetime, timezone

from llmops.control.admin.wire import Period
from llmops.errors import InputError


def period_of(first: date | None, last: date | None, now: datetime) -> Period:
    """From the first of the month to today, unless said otherwise. Raises InputError where it ends before it begins."""
    today = now.astimezone(timezone.utc).date()
    last = last or max(today, first or today)
    first = first or last.replace(day=1)
    if first > last:
        raise InputError(f"A period from {first} to {last} ends before it begins; swap the two days.")
    return Period(first=first, last=last)
