"""The hourly reconciliation of the ledger with gateways and engines.

The job also records the token counts of engines. Missing events need not be requested: a gateway
keeps each event until the ledger has it, and sends it again. A gap that remains belongs to a
gateway that has not come back, or that lost its outbox.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import httpx

from llmops.background import every
from llmops.contract import ENGINE_SUFFIX
from llmops.control.admin.reconcile import reconcile
from llmops.control.admin.schemas import ReconciliationRequest
from llmops.control.leader_jobs import LeaderJob
from llmops.errors import ResourceError
from llmops.fair_client import fair_client
from llmops.input_files import MALFORMED
from llmops.metrics_pages import parse_samples
from llmops.store.audit import AuditContext
from llmops.store.factory import open_store
from llmops.untrusted_text import escape_unsafe, is_safe_text
from llmops.urls import fetch_bounded, without_secrets

log = logging.getLogger(__name__)

#: Seconds between two reports.
REPORT_INTERVAL = 3600.0

#: Maximum number of gateways that the log names. Whoever has the signing key can make up gateways
#: and gaps, as well as usage.
NAMED_GATEWAYS = 5

#: Name of Triton's histogram of the output lengths of all finished answers of an engine.
SERVED_TOKENS_METRIC = "nv_llm_output_token_len"
_SUM = f"{SERVED_TOKENS_METRIC}_sum"

#: Maximum size of a metrics page in bytes. A longer page is rejected before it is parsed.
MAX_PAGE_BYTES = 8 * 2**20

#: Maximum seconds for one metrics page, from the connection to the last byte, so that a server that
#: hangs does not hold up the report.
PAGE_TIMEOUT = 10.0


async def served_tokens(pages: Sequence[str]) -> dict[str, int]:
    """Return the output tokens of all answers that engines have finished, by model.

    Args:
        pages: URLs of the metrics pages of Triton servers.

    Raises:
        ResourceError: A page cannot be read.
    """
    tokens: dict[str, int] = {}
    async with fair_client(timeout=PAGE_TIMEOUT) as client:
        for page in pages:
            try:
                async with asyncio.timeout(PAGE_TIMEOUT):
                    body = await fetch_bounded(client, page, MAX_PAGE_BYTES)
                for sample in parse_samples(body.decode(), (_SUM,)):
                    model = sample.labels.get("model", "").removesuffix(ENGINE_SUFFIX)
                    if not is_safe_text(model):
                        raise ValueError("a model's name has a control character")
                    if sample.name == _SUM:
                        tokens[model] = tokens.get(model, 0) + round(sample.value)
            except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, *MALFORMED) as error:
                place = without_secrets(page)
                raise ResourceError(
                    f"The metrics page {place} cannot be read ({type(error).__name__}); check that its server runs."
                ) from error
    return tokens


class Reconciler(LeaderJob):
    """The job that makes a report every hour, and logs a warning if events are missing."""

    name = "The reconciler"

    def __init__(self, store: str, engines: Sequence[str] = (), interval: float = REPORT_INTERVAL) -> None:
        self._store, self._engines, self._interval = store, engines, interval

    async def run(self) -> None:
        """Make reports until cancelled. Raises ResourceError if the store does not answer.

        If an engine does not answer, the report is made without the counts of engines, so that it
        still lists missing events.
        """
        await every(self._interval, self._report)

    async def _report(self) -> None:
        try:
            served = await served_tokens(self._engines)
        except ResourceError as error:
            log.error("This hour's report does not compare the ledger with the engines. %s", error.message)
            served = {}
        by = AuditContext("control", datetime.now(UTC))
        async with await open_store(self._store, pool_size=1) as store, store.write() as connection:
            report = await reconcile(connection, by, ReconciliationRequest(served=served))
        if report.missing:
            first, missing = dict[str, int](), Counter[str]()
            for gap in report.gaps:
                first.setdefault(gap.gateway, gap.first)
                missing[gap.gateway] += gap.last - gap.first + 1
            named = [
                f"{missing[one]} of gateway {escape_unsafe(one)} from number {first[one]}"
                for one in list(first)[:NAMED_GATEWAYS]
            ]
            log.warning(
                "%d usage events have not arrived: %s%s. A gateway sends its events again; start a gateway that does "
                "not run.",
                report.missing,
                ", ".join(named),
                f" and of {len(first) - len(named)} more" if len(first) > len(named) else "",
            )
