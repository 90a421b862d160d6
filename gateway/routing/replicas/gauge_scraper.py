"""The state of engines that do not say it themselves: NVIDIA's C++ backend shows it on its server's metrics port.

Source: NVIDIA/TensorRT-LLM `triton_backend/inflight_batcher_llm/src/custom_metrics_reporter/`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from llmops.contract import ENGINE_SUFFIX
from llmops.gateway.routing.replicas.load_estimator import EngineGauges
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.telemetry.metric_definitions import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.telemetry.metric_definitions import ENGINE_GENERAL as GENERAL
from llmops.gateway.telemetry.metric_definitions import ENGINE_REQUESTS as REQUESTS
from llmops.http_fetch import fetch_bounded

log = logging.getLogger(__name__)

# how often (s), and how long an answer may take
SCRAPE_INTERVAL, SCRAPE_TIMEOUT = 0.5, 2.0
#: Bytes of a metrics page: a longer one is refused before it is parsed.
MAX_PAGE_BYTES = 8 * 2**20
GAUGE_LABELS = {REQUESTS: "request_type", BLOCKS: "kv_cache_block_type", GENERAL: "general_type"}

# by family and value of its label
GaugeValues = Mapping[str, Mapping[str, float]]


class GaugeScraper:
    """A reader of the metrics pages of measured replicas' servers.

    Gauges add what other gateways have sent, and the KV cache, to what this gateway measures by itself.
    """

    def __init__(self, port: int) -> None:
        """`port` of every server's metrics."""
        self._port = port
        self._client: httpx.AsyncClient | None = None
        self._silent: set[str] = set()

    async def look(self, replicas: Iterable[Replica]) -> None:
        by_server: dict[str, list[Replica]] = defaultdict(list)
        for replica in replicas:
            if replica.measured is not None:
                by_server[replica.server].append(replica)
        if by_server:
            await asyncio.gather(*(self._scrape(server, some) for server, some in by_server.items()))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _scrape(self, server: str, replicas: list[Replica]) -> None:
        url = f"http://{server.rpartition(':')[0]}:{self._port}/metrics"
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=SCRAPE_TIMEOUT, verify=False)
        try:
            body = await asyncio.wait_for(fetch_bounded(self._client, url, MAX_PAGE_BYTES), SCRAPE_TIMEOUT)
            found = parse_metrics_page(body.decode())
        except (TimeoutError, httpx.HTTPError, ValueError, LookupError) as error:
            self._tell(url, error)
            for replica in replicas:
                replica.gauges_unavailable()
            return
        self._silent.discard(url)
        for replica in replicas:
            gauges = gauges_from_values(found.get(replica.engine_model or replica.model.name + ENGINE_SUFFIX, {}))
            if gauges is not None:
                replica.scraped(gauges)

    def _tell(self, url: str, error: Exception) -> None:
        if url not in self._silent:
            self._silent.add(url)
            log.warning("%s cannot be read (%s); other gateways' requests there are not known", url, error)


def parse_metrics_page(text: str) -> Mapping[str, GaugeValues]:
    """Return the values of each engine model on a metrics page. Raises ValueError for any other text."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for family in text_string_to_metric_families(text):
        label = GAUGE_LABELS.get(family.name)
        for sample in family.samples if label else ():
            own = found.setdefault(sample.labels.get("model", ""), {name: {} for name in GAUGE_LABELS})
            own[family.name][sample.labels.get(label or "", "")] = sample.value
    return found


def gauges_from_values(values: GaugeValues) -> EngineGauges | None:
    """Return a model's gauges; None where the page has none of its requests. The cache has none before a prompt."""
    requests, blocks = values.get(REQUESTS, {}), values.get(BLOCKS, {})
    if "active" not in requests:
        return None
    total = max(int(blocks.get("max", 0)), 0)
    return EngineGauges(
        active=max(int(requests["active"]), 0),
        waiting=max(int(requests.get("waiting", 0) + requests.get("context", 0)), 0),
        iterations=values.get(GENERAL, {}).get("iteration_counter", 0.0),
        blocks=total,
        free_blocks=min(max(int(blocks.get("free", 0)), 0), total),
        tokens_per_block=max(int(blocks.get("tokens_per", 0)), 0),
    )
