"""Does the ledger have everything? What gateways wrote and has not come, and what engines say that they served.

Nothing has to be asked for again: a gateway keeps an event until the ledger's mark has passed it, and sends again what
the mark stands before. A gap that stays is one whose gateway has not come back, or has lost its journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime, timezone

import httpx
from prometheus_client.parser import text_string_to_metric_families

from llmops.contract import ENGINE
from llmops.control.admin.wire import ReconciliationWanted
from llmops.control.admin.work.reconcile import reconcile
from llmops.control.duties import Duty
from llmops.errors import ResourceError
from llmops.fetch import fetch
from llmops.store.audit import By
from llmops.store.open import open_store

log = logging.getLogger(__name__)

EVERY = 3600.0
# Triton's own page: the lengths of all answers that an engine ended
SERVED = "nv_llm_output_token_len"
#: Bytes of a metrics page: a longer one is refused before it is parsed.
MOST_BYTES = 8 * 2**20
#: Seconds for one metrics page, from the connection to its last byte.
PATIENCE = 10.0


async def served_by(pages: Sequence[str]) -> dict[str, int]:
    """Tokens of all answers that the engines behind these Triton metrics pages have ended, by model.

    Raises ResourceError for one that does not answer.
    """
    found: dict[str, int] = {}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        for page in pages:
            try:
                body = await asyncio.wait_for(fetch(client, page, MOST_BYTES), PATIENCE)
                families = list(text_string_to_metric_families(body.decode()))
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, asyncio.TimeoutError) as error:
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
