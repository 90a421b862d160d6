"""Gauges of engines that do not report their state.

NVIDIA's C++ backend exports these gauges on the server's metrics port. They are defined in
NVIDIA/TensorRT-LLM `triton_backend/inflight_batcher_llm/src/custom_metrics_reporter/`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

import httpx

from llmops.background import LogOnce
from llmops.contract import ENGINE_SUFFIX
from llmops.fair_client import fair_client
from llmops.gateway.routing.replicas.load_estimator import EngineGauges
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.telemetry.metric_definitions import ENGINE_REQUESTS as REQUESTS
from llmops.metrics_pages import parse_samples
from llmops.urls import fetch_bounded

log = logging.getLogger(__name__)

#: Seconds between two scrapes: a quarter of GAUGES_MAX_AGE, so that the gauges remain known if a
#: scrape fails.
SCRAPE_INTERVAL = 0.5
#: Maximum seconds for a server's answer to a scrape, so that a server that hangs is tried again.
SCRAPE_TIMEOUT = 2.0
#: Maximum size of a metrics page in bytes. A longer page is rejected before it is parsed.
MAX_PAGE_BYTES = 8 * 2**20
#: The largest plausible value of a gauge, up to which floats represent all integers. Larger values
#: and NaN are ignored.
MAX_VALUE = 2.0**53
GAUGE_LABELS = {REQUESTS: "request_type", BLOCKS: "kv_cache_block_type"}

#: The values of one model's gauges, by metric family and label.
GaugeValues = Mapping[str, Mapping[str, float]]


class GaugeScraper:
    """A reader of the metrics pages of servers whose replicas do not report their state.

    The gauges show the requests of other gateways and the KV cache, which a gateway cannot observe
    itself.
    """

    def __init__(self, port: int) -> None:
        """Create a scraper. `port` is the metrics port of every server."""
        self._port = port
        self._client: httpx.AsyncClient | None = None
        self._log_once = LogOnce()

    async def scrape(self, replicas: Iterable[Replica]) -> None:
        """Update the replicas that do not report their state from their servers' gauges."""
        by_server: dict[str, list[Replica]] = defaultdict(list)
        for replica in replicas:
            if replica.load_estimator is not None:
                by_server[replica.server].append(replica)
        if by_server:
            await asyncio.gather(*(self._scrape_server(server, some) for server, some in by_server.items()))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _scrape_server(self, server: str, replicas: list[Replica]) -> None:
        url = f"http://{server.rpartition(':')[0]}:{self._port}/metrics"
        if self._client is None:
            self._client = fair_client(timeout=SCRAPE_TIMEOUT, verify=False)
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT):
                body = await fetch_bounded(self._client, url, MAX_PAGE_BYTES)
            found = parse_metrics_page(body.decode())
        except (TimeoutError, httpx.HTTPError, ValueError) as error:
            if self._log_once.is_new(url, "unreadable"):
                log.warning(
                    "%s cannot be read (%s); until it is readable again, requests of other gateways are ignored",
                    url,
                    error,
                )
            for replica in replicas:
                replica.update_gauges(None)
            return
        self._log_once.is_new(url, None)
        for replica in replicas:
            gauges = gauges_from_values(found.get(replica.engine_model or replica.model.name + ENGINE_SUFFIX, {}))
            if gauges is not None:
                replica.update_gauges(gauges)


def parse_metrics_page(text: str) -> Mapping[str, GaugeValues]:
    """Return the values of each engine model on a metrics page.

    Raises:
        ValueError: The text is not a metrics page.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for sample in parse_samples(text, tuple(GAUGE_LABELS)):
        label = GAUGE_LABELS.get(sample.name)
        if label and abs(sample.value) < MAX_VALUE:
            own = found.setdefault(sample.labels.get("model", ""), {name: {} for name in GAUGE_LABELS})
            own[sample.name][sample.labels.get(label, "")] = sample.value
    return found


def gauges_from_values(values: GaugeValues) -> EngineGauges | None:
    """Return a model's gauges, or None if the page does not show its requests.

    The gauges of the KV cache may be missing.
    """
    requests, blocks = values.get(REQUESTS, {}), values.get(BLOCKS, {})
    if "active" not in requests:
        return None
    total = max(int(blocks.get("max", 0)), 0)
    return EngineGauges(
        active=max(int(requests["active"]), 0),
        waiting=max(int(requests.get("waiting", 0) + requests.get("context", 0)), 0),
        blocks=total,
        free_blocks=min(max(int(blocks.get("free", 0)), 0), total),
        tokens_per_block=max(int(blocks.get("tokens_per", 0)), 0),
    )
