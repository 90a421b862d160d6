"""Reconciliation of the ledger with gateways and engines.

The ledger is compared with the event numbers of gateways and with the token counts of engines.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from llmops.control.admin.schemas import EngineTokens, MissingEvents, Reconciliation, ReconciliationRequest
from llmops.store.audit import AuditContext, list_audit_entries, record_action
from llmops.store.columns import DAMAGED
from llmops.store.tables import gateways
from llmops.store.usage_queries import UsageFilter, find_sequence_gaps, sum_usage

#: Name of the action under which the audit log stores the reports.
ACTION = "usage.reconcile"


async def reconcile(connection: AsyncConnection, by: AuditContext, request: ReconciliationRequest) -> Reconciliation:
    """Compare the ledger with gateways and engines since the previous report.

    Store the new report in the audit log.
    """
    entries = await list_audit_entries(connection, limit=1, action=ACTION)
    previous: Sequence[EngineTokens] = ()
    # without a readable report, counting begins again
    with suppress(*DAMAGED):
        previous = [EngineTokens.model_validate(one) for entry in entries for one in entry.detail["engines"]]
    found = await find_sequence_gaps(connection)
    gaps = tuple(MissingEvents(gateway=gap.gateway_id, first=gap.first, last=gap.last) for gap in found)
    count = await connection.scalar(select(func.count()).select_from(gateways))
    report = Reconciliation(
        at=by.at,
        gateways=count or 0,
        missing=sum(gap.last - gap.first + 1 for gap in gaps),
        gaps=gaps,
        engines=await _compare_engines(connection, request.served, previous),
    )
    await record_action(connection, by, ACTION, "ledger", detail=report.data())
    return report


async def _compare_engines(
    connection: AsyncConnection, served: Mapping[str, int], previous: Sequence[EngineTokens]
) -> tuple[EngineTokens, ...]:
    earlier = {engine.model: engine for engine in previous}
    if not served:
        # reports without counts are skipped: the increase is computed since the last report with
        # counts
        return tuple(previous)
    sums = await sum_usage(connection, UsageFilter(), ("model",))
    billed = {str(one.group["model"]): one.output_tokens for one in sums}
    engines = []
    for model, tokens in sorted(served.items()):
        engine = EngineTokens(model=model, served=tokens, billed=billed.get(model, 0))
        last = earlier.get(model)
        # a restarted engine counts from 0 again
        if last is not None and tokens >= last.served:
            unbilled = (tokens - last.served) - (engine.billed - last.billed)
            engine = engine.model_copy(update={"unbilled": unbilled})
        engines.append(engine)
    return tuple(engines)
