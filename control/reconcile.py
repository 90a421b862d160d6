"""Does the ledger have everything? What gateways wrote and has not come, and what engines say that they served.

Nothing has to be asked for again: a gateway keeps an event until the ledger's mark has passed it, and sends again what
the mark stands before. A gap that stays is one whose gateway has not come back, or has lost its journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx
from prometheus_client.parser import text_string_to_metric_families

from llmops.contract import ENGINE_SUFFIX
from llmops.control.admin.handlers.reconcile import reconcile
from llmops.control.admin.schemas import ReconciliationRequest
from llmops.control.leader_jobs import LeaderJob
from llmops.errors import ResourceError
from llmops.http_fetch import fetch_bounded
from llmops.store.audit import AuditContext
from llmops.store.factory import open_store

log = logging.getLogger(__name__)

REPORT_INTERVAL = 3600.0
# Triton's own page: the lengths of all answers that an engine ended
SERVED_TOKENS_METRIC = "nv_llm_output_token_len"
#: Bytes of a metrics page: a longer one is refused before it is parsed.
MAX_PAGE_BYTES = 8 * 2**20
#: Seconds for one metrics page, from the connection to its last byte.
PAGE_TIMEOUT = 10.0


async def served_tokens(pages: Sequence[str]) -> dict[str, int]:
    """Tokens of all answers that the engines behind these Triton metrics pages have ended, by model.

    Raises ResourceError for one that does not answer.
    """
    found: dict[str, int] = {}
    async with httpx.AsyncClient(timeout=PAGE_TIMEOUT) as client:
        for page in pages:
            try:
                body = await asyncio.wait_for(fetch_bounded(client, page, MAX_PAGE_BYTES), PAGE_TIMEOUT)
                families = list(text_string_to_metric_families(body.decode()))
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                raise ResourceError(f"The metrics page {page} cannot be read ({type(error).__name__}).") from error
            for sample in (one for family in families for one in family.samples):
                if sample.name == f"{SERVED_TOKENS_METRIC}_sum":
                    model = sample.labels.get("model", "").removesuffix(ENGINE_SUFFIX)
                    found[model] = found.get(model, 0) + round(sample.value)
    return found


class Reconciler(LeaderJob):
    """A report each hour, and a line in the log where something is missing."""

    name = "The reconciler"

    def __init__(self, store: str, engines: Sequence[str] = (), every: float = REPORT_INTERVAL) -> None:
        self._url, self._engines, self._every = store, engines, every

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            served = await served_tokens(self._engines)
            by = AuditContext("control", datetime.now(UTC))
            async with await open_store(self._url, pool_size=1) as store, store.write() as connection:
                report = await reconcile(connection, by, ReconciliationRequest(served=served))
            if report.missing:
                log.warning(
                    "%d events of usage have not arrived, the first of gateway %s with number %d.",
                    report.missing,
                    report.gaps[0].gateway,
                    report.gaps[0].first,
                )
