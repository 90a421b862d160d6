"""Does the ledger have everything? What gateways wrote and has not come, and what engines say that they served.

Nothing has to be asked for again: a gateway keeps an event until the ledger's mark has passed it, and sends again what
the mark stands before. A gap that stays is one whose gateway has not come back, or has lost its journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.contract import ENGINE
from llmops.control.admin.wire import EngineTokens, MissingEvents, Reconciliation, ReconciliationWanted
from llmops.control.duties import Duty
from llmops.errors import ResourceError
from llmops.store.audit import By, entries, record
from llmops.store.open import open_store
from llmops.store.tables import gateways
from llmops.store.usage import UsageFilter, gaps, sum_usage

log = logging.getLogger(__name__)

ACTION = "usage.reconcile"
EVERY = 3600.0
# Triton's own page: the lengths of all answers that an engine ended
SERVED = "nv_llm_output_token_len"


async def reconcile(connection: AsyncConnection, by: By, asked: ReconciliationWanted) -> Reconciliation:
    """The report is kept in the audit log; what it says of engines is since the report before it."""
    last = await entries(connection, limit=1, action=ACTION)
    before = Reconciliation.model_validate(last[0].detail) if last else None
    known = {(one.gateway, one.first, one.last): one.since for one in before.gaps} if before else {}
    found = tuple(
        MissingEvents(
            gateway=gap.gateway_id,
            first=gap.first,
            last=gap.last,
            since=known.get((gap.gateway_id, gap.first, gap.last), by.at),
        )
        for gap in await gaps(connection)
    )
    count = await connection.scalar(select(func.count()).select_from(gateways))
    report = Reconciliation(
        at=by.at,
        gateways=count or 0,
        missing=sum(one.last - one.first + 1 for one in found),
        gaps=found,
        engines=await _engines(connection, asked.served, before),
    )
    await record(connection, by, ACTION, "ledger", detail=report.data())
    return report


async def _engines(
    connection: AsyncConnection, served: Mapping[str, int], before: Reconciliation | None
) -> tuple[EngineTokens, ...]:
    if not served:
        # what was said last is what the next is compared with
        return before.engines if before is not None else ()
    sums = await sum_usage(connection, UsageFilter(), ("model",))
    billed = {str(one.group["model"]): one.output_tokens for one in sums}
    earlier = {one.model: one for one in before.engines} if before is not None else {}
    lines = []
    for model, tokens in sorted(served.items()):
        line = EngineTokens(model=model, served=tokens, billed=billed.get(model, 0))
        last = earlier.get(model)
        # an engine that was started again counts from 0
        if last is not None and tokens >= last.served:
            unbilled = (tokens - last.served) - (line.billed - last.billed)
            line = line.model_copy(update={"unbilled": unbilled})
        lines.append(line)
    return tuple(lines)


async def served_by(pages: Sequence[str]) -> dict[str, int]:
    """Tokens of all answers that the engines behind these Triton metrics pages have ended, by model.

    Raises ResourceError for one that does not answer.
    """
    found: dict[str, int] = {}
    async with httpx.AsyncClient(timeout=10.0) as client:
        for page in pages:
            try:
                answer = (await client.get(page)).raise_for_status()
                families = list(text_string_to_metric_families(answer.text))
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                raise ResourceError(f"The metrics page {page} cannot be read ({type(error).__name__}).") from error
            for sample in (one for family in families for one in family.samples):
                if sample.name == f"{SERVED}_sum":
                    model = sample.labels.get("model", "").removesuffix(ENGINE)
                    found[model] = found.get(model, 0) + round(sample.value)
    return found


class Reconciler(Duty):
    """A report each hour, and a line in the log where something is missing."""

    name = "The reconciler"

    def __init__(self, store: str, engines: Sequence[str] = (), every: float = EVERY) -> None:
        self._url, self._engines, self._every = store, engines, every

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            served = await served_by(self._engines)
            by = By("control", datetime.now(timezone.utc))
            async with await open_store(self._url, pool_size=1) as store, store.write() as connection:
                report = await reconcile(connection, by, ReconciliationWanted(served=served))
            if report.missing:
                log.warning(
                    "%d events of usage have not arrived, the first of gateway %s with number %d.",
                    report.missing,
                    report.gaps[0].gateway,
                    report.gaps[0].first,
                )
