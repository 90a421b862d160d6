"""What gateways wrote and has not come, and what engines say that they served."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin.schemas import EngineTokens, MissingEvents, Reconciliation, ReconciliationRequest
from llmops.store.audit import AuditContext, list_audit_entries, record_action
from llmops.store.tables import gateways
from llmops.store.usage_queries import UsageFilter, find_sequence_gaps, sum_usage

ACTION = "usage.reconcile"


async def reconcile(connection: AsyncConnection, by: AuditContext, asked: ReconciliationRequest) -> Reconciliation:
    """The report is kept in the audit log; what it says of engines is since the report before it."""
    last = await list_audit_entries(connection, limit=1, action=ACTION)
    before = Reconciliation.model_validate(last[0].detail) if last else None
    known = {(one.gateway, one.first, one.last): one.since for one in before.gaps} if before else {}
    found = tuple(
        MissingEvents(
            gateway=gap.gateway_id,
            first=gap.first,
            last=gap.last,
            since=known.get((gap.gateway_id, gap.first, gap.last), by.at),
        )
        for gap in await find_sequence_gaps(connection)
    )
    count = await connection.scalar(select(func.count()).select_from(gateways))
    report = Reconciliation(
        at=by.at,
        gateways=count or 0,
        missing=sum(one.last - one.first + 1 for one in found),
        gaps=found,
        engines=await _engines(connection, asked.served, before),
    )
    await record_action(connection, by, ACTION, "ledger", detail=report.data())
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
