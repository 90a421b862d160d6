"""A gateway's usage while its PostgreSQL is away."""

from __future__ import annotations

import tracemalloc
from uuid import UUID

from sqlalchemy import func, select

from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, Outcome, Usage
from llmops.gateway.settings import UsageSettings
from llmops.gateway.usage.ledger_sink import LedgerSink
from llmops.gateway.usage.sink import NoPrices
from llmops.gateway.usage.usage_check import UsageCheck
from llmops.store.factory import open_store
from llmops.store.tables import tenant_totals, usage_records

GENEROUS = 60.0
CALLER = Caller("acme", str(UUID(int=7)), "key-a", "acme/key-a")


async def test_litellm_38193_no_row_is_dropped_and_no_memory_filled(own_postgres, tmp_path):
    url, stop, start = own_postgres
    check = UsageCheck(tmp_path / "usage", UsageSettings(), LedgerSink(url), NoPrices())
    await check.start()

    async def requests(count: int) -> None:
        for at in range(count):
            context = RequestContext(f"req_{at}", caller=CALLER)
            await check.before({"type": "http", "method": "POST", "headers": []}, context)
            context.usage_recorder.begin("tiny", f"chatcmpl-{at}", 10)
            context.usage_recorder.end(Outcome(200, "stop", Usage(10, 5)))
            check.after(context, Outcome(200))
            # As the gateway's own task does ten times a second.
            if at % 50 == 49:
                check.worker.writer.flush()

    await requests(100)
    await check.settle(GENEROUS)
    assert check.worker.delivery.behind == 0
    stop()
    tracemalloc.start()
    await requests(1000)
    before, _ = tracemalloc.get_traced_memory()
    await requests(3000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # one event is some 600 bytes: they are in the outbox, and only there
    assert grown < 300_000
    start()
    await check.settle(GENEROUS)
    assert check.worker.delivery.behind == 0
    await check.close()
    async with await open_store(url) as store, store.read() as connection:
        seqs = (await connection.execute(select(usage_records.c.seq))).scalars().all()
        total = await connection.scalar(select(func.sum(tenant_totals.c.output_tokens)))
    assert sorted(seqs) == list(range(4100))
    assert total == 5 * (4100)
