"""Who was refused, for the audit log: counted by the minute, so that a storm is a few lines and not a line each."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from llmops.clocks import utc_now
from llmops.errors import LlmopsError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome

log = logging.getLogger(__name__)

# seconds for which refusals are counted before they are written
WINDOW = 60.0
# whom and what is told apart in that time; those beyond count as the others
MAX_GROUPS = 200
OTHERS = "others"
AUDITED_STATUSES = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class RejectionCount:
    """So many, alike, from `first` to `last`. `actor`: `key:` or `user:` and its id, or `address:` and a stranger's."""

    actor: str
    tenant_id: str
    route: str
    status: int
    count: int
    first: datetime
    last: datetime

    def again(self, count: int, last: datetime) -> RejectionCount:
        return replace(self, count=self.count + count, last=last)


class AuditLog(ABC):
    """Where refusals are written."""

    @abstractmethod
    async def write(self, refusals: Sequence[RejectionCount]) -> None:
        """All of them or none. Raises LlmopsError where it cannot."""

    async def close(self) -> None:
        return


class RejectionAudit:
    """What was refused since the last writing. Nothing runs while nothing is refused."""

    def __init__(self, audit: AuditLog, window: float = WINDOW, now: Callable[[], datetime] = utc_now) -> None:
        self._audit, self._window, self._now = audit, window, now
        self._counted: dict[tuple[str, str, int], RejectionCount] = {}
        self._writing: asyncio.Task[None] | None = None

    def note(self, context: RequestContext, outcome: Outcome) -> None:
        """The end of a request: whether it was refused."""
        if outcome.status not in AUDITED_STATUSES:
            return
        now, caller = self._now(), context.caller
        self._count(RejectionCount(_actor(caller), caller.tenant_id, context.route, outcome.status, 1, now, now))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_soon(), name="write-refusals")

    async def close(self) -> None:
        """What is not written yet is."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._write()
        await self._audit.close()

    def _count(self, new: RejectionCount) -> None:
        of = (new.actor, new.route, new.status)
        if of not in self._counted and len(self._counted) >= MAX_GROUPS:
            new = replace(new, actor=OTHERS, tenant_id="", route="")
            of = (new.actor, new.route, new.status)
        known = self._counted.get(of)
        self._counted[of] = new if known is None else known.again(new.count, new.last)

    async def _write_soon(self) -> None:
        while self._counted:
            await asyncio.sleep(self._window)
            await self._write()
        self._writing = None

    async def _write(self) -> None:
        counted, self._counted = self._counted, {}
        if not counted:
            return
        try:
            await self._audit.write(list(counted.values()))
        except asyncio.CancelledError:
            self._keep(counted)
            raise
        except Exception as error:  # noqa: BLE001  whatever it is made of
            self._keep(counted)
            said = error.message if isinstance(error, LlmopsError) else type(error).__name__
            log.error("refusals cannot be written to the audit log, and are kept for later. %s", said)

    def _keep(self, counted: dict[tuple[str, str, int], RejectionCount]) -> None:
        """What could not be written, with what came meanwhile."""
        newer, self._counted = self._counted, counted
        for refusal in newer.values():
            self._count(refusal)


def _actor(caller: Caller) -> str:
    if caller.key_id:
        return f"key:{caller.key_id}"
    return f"user:{caller.user_id}" if caller.tenant_id else f"address:{caller.share.partition('/')[0]}"
