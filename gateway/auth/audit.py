"""The audit of rejected requests and of safety findings.

Equal entries are counted per minute, so that a flood of rejections becomes a few entries.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from llmops.background import cancel_tasks
from llmops.clocks import utc_now
from llmops.errors import LlmopsError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome

log = logging.getLogger(__name__)

#: Seconds during which equal entries are counted before the count is written as one entry.
WINDOW = 60.0
#: Maximum number of different entries in one window: for callers with a key, and again for
#: addresses without a key, so that strangers cannot use up the entries of callers. Further entries
#: are counted under the actor `OTHERS`: together for addresses, by tenant and subject for callers.
MAX_GROUPS = 200
#: Maximum number of different entries of one actor in a window. A caller can name any end user, and
#: must not use up the entries of other actors. Further entries omit the details that the caller
#: chose.
MAX_GROUPS_PER_ACTOR = 20
OTHERS = "others"
AUDITED_STATUSES = frozenset({401, 403})
REJECTED, FOUND = "access.refused", "safety.found"
_ADDRESS = "address:"


@dataclass(frozen=True, slots=True)
class AuditCount:
    """A count of equal rejections or findings between two times.

    Attributes:
        actor: The caller, as `key:ID`, `user:ID` or `address:IP`, or `others`.
        tenant_id: The tenant's id, empty if the actor has no tenant.
        action: The event, `REJECTED` or `FOUND`.
        subject: The route of a rejected request, or the filter that found something.
        details: Further names and values that all counted entries have in common.
        count: The number of rejections or findings.
        first: The time of the first rejection or finding, in UTC.
        last: The time of the last rejection or finding, in UTC.
    """

    actor: str
    tenant_id: str
    action: str
    subject: str
    details: tuple[tuple[str, str | int], ...]
    count: int
    first: datetime
    last: datetime

    def plus(self, count: int, last: datetime) -> AuditCount:
        return replace(self, count=self.count + count, last=last)


_Group = tuple[str, str, str, str, tuple[tuple[str, str | int], ...]]


class AuditLog(ABC):
    """An interface to the log that counted entries are written to."""

    @abstractmethod
    async def write(self, entries: Sequence[AuditCount]) -> None:
        """Write all entries or none of them.

        Raises:
            LlmopsError: The log cannot be written.
        """

    async def close(self) -> None:
        """Close the connections to the log."""
        return


class CountingAudit:
    """A counter of rejections and findings, written to an audit log every `window` seconds.

    No task runs while nothing is counted.
    """

    def __init__(self, audit: AuditLog, window: float = WINDOW, now: Callable[[], datetime] = utc_now) -> None:
        self._audit, self._window, self._now = audit, window, now
        self._counted: dict[_Group, AuditCount] = {}
        # Number of entries in `_counted` by their actor.
        self._groups: Counter[str] = Counter()
        # Number of entries of addresses (True) and of callers (False).
        self._sizes: Counter[bool] = Counter()
        self._writing: asyncio.Task[None] | None = None

    def note(self, context: RequestContext, outcome: Outcome) -> None:
        """Count the request if it was rejected for its credential."""
        if outcome.status not in AUDITED_STATUSES:
            return
        self._note(context.caller, REJECTED, context.route, ("status", outcome.status))

    def note_finding(self, caller: Caller, filter_name: str, **details: str) -> None:
        """Count a finding of a safety filter. The details must not contain the text."""
        self._note(caller, FOUND, filter_name, *((name, value) for name, value in details.items() if value))

    def _note(self, caller: Caller, action: str, subject: str, *details: tuple[str, str | int]) -> None:
        now = self._now()
        self._count(AuditCount(_actor(caller), caller.tenant_id, action, subject, details, 1, now, now))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_soon(), name="write-refusals")

    async def close(self) -> None:
        """Write the remaining counts, and close the log."""
        await cancel_tasks(self._writing)
        await self._write()
        await self._audit.close()

    def _count(self, new: AuditCount) -> None:
        group = _group(new)
        if group not in self._counted and self._groups[new.actor] >= MAX_GROUPS_PER_ACTOR:
            new = _without_details(new)
            group = _group(new)
        is_stranger = new.actor.startswith(_ADDRESS)
        if group not in self._counted and self._sizes[is_stranger] >= MAX_GROUPS:
            # A tenant with many keys must not displace the findings of other tenants.
            new = replace(_without_details(new), actor=OTHERS)
            if is_stranger:
                new = replace(new, tenant_id="", subject="")
            group = _group(new)
        if group not in self._counted:
            self._groups[new.actor] += 1
            self._sizes[is_stranger] += 1
        known = self._counted.get(group)
        self._counted[group] = new if known is None else known.plus(new.count, new.last)

    async def _write_soon(self) -> None:
        while self._counted:
            await asyncio.sleep(self._window)
            await self._write()
        self._writing = None

    async def _write(self) -> None:
        counted, self._counted = self._counted, {}
        self._groups.clear()
        self._sizes.clear()
        if not counted:
            return
        try:
            await self._audit.write(list(counted.values()))
        except asyncio.CancelledError:
            self._keep(counted)
            raise
        except Exception as error:  # noqa: BLE001  no error may end the audit
            self._keep(counted)
            reason = error.message if isinstance(error, LlmopsError) else type(error).__name__
            log.error(
                "Refusals and findings cannot be written to the audit log; the gateway keeps them and retries. %s",
                reason,
            )

    def _keep(self, counted: dict[_Group, AuditCount]) -> None:
        """Put entries back that could not be written, and add the entries counted in the meantime."""
        newer, self._counted = self._counted, counted
        self._groups = Counter(entry.actor for entry in counted.values())
        self._sizes = Counter(entry.actor.startswith(_ADDRESS) for entry in counted.values())
        for entry in newer.values():
            self._count(entry)


def _group(entry: AuditCount) -> _Group:
    return entry.actor, entry.tenant_id, entry.action, entry.subject, entry.details


def _without_details(entry: AuditCount) -> AuditCount:
    """Return the entry without the details that its caller chose.

    The details of a rejection stay, because they are a status, of which only a few exist.
    """
    return entry if entry.action == REJECTED else replace(entry, details=())


def _actor(caller: Caller) -> str:
    if caller.key_id:
        return f"key:{caller.key_id}"
    return f"user:{caller.user_id}" if caller.tenant_id else f"{_ADDRESS}{caller.share.partition('/')[0]}"
