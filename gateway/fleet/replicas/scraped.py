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

from llmops.contract import ENGINE
from llmops.fetch import fetch
from llmops.gateway.fleet.replicas.replica import Replica
from llmops.gateway.observability.names import ENGINE_BLOCKS as BLOCKS
from llmops.gateway.observability.names import ENGINE_REQUESTS as REQUESTS

log = logging.getLogger(__name__)

# how often (s), and how long an answer may take
PERIOD, TIMEOUT = 0.5, 2.0
#: Bytes of a metrics page: a longer one is refused before it is parsed.
MOST_BYTES = 8 * 2**20
LABELS = {REQUESTS: "request_type", BLOCKS: "kv_cache_block_type"}

Gauges = Mapping[str, Mapping[str, float]]


class Scraper:
    """Looks at the servers of the replicas that say nothing. While one does not answer, what is known of it stays: it
    is own requests that count then, and Triton's word whether it is there."""

    def __init__(self, port: int) -> None:
        """`port` of every server's metrics."""
        self._port = port
        self._client: httpx.AsyncClient | None = None
        self._silent: set[str] = set()

    async def look(self, replicas: Iterable[Replica]) -> None:
        by_server: dict[str, list[Replica]] = defaultdict(list)
        for replica in replicas:
            if not replica.health.speaks:
                by_server[replica.server].append(replica)
        if by_server:
            await asyncio.gather(*(self._scrape(server, some) for server, some in by_server.items()))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _scrape(self, server: str, replicas: list[Replica]) -> None:
        url = f"http://{server.rpartition(':')[0]}:{self._port}/metrics"
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=TIMEOUT, verify=False)
        try:
            body = await asyncio.wait_for(fetch(self._client, url, MOST_BYTES), TIMEOUT)
            found = gauges(body.decode())
        except (httpx.HTTPError, ValueError, LookupError, asyncio.TimeoutError) as error:
            self._tell(url, error)
            for replica in replicas:
                replica.settle()
            return
        self._silent.discard(url)
        for replica in replicas:
            believe(replica, found.get(replica.engine_model or replica.model.name + ENGINE, {}))

    def _tell(self, url: str, error: Exception) -> None:
        if url not in self._silent:
            self._silent.add(url)
            log.warning("%s cannot be read (%s); replicas there are judged by own requests", url, error)


def gauges(text: str) -> Mapping[str, Gauges]:
    """`family of the label's values -> value` of each engine model. Raises ValueError for any other text."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for family in text_string_to_metric_families(text):
        label = LABELS.get(family.name)
        for sample in family.samples if label else ():
            own = found.setdefault(sample.labels.get("model", ""), {REQUESTS: {}, BLOCKS: {}})
            own[family.name][sample.labels.get(label or "", "")] = sample.value
    return found


def believe(replica: Replica, found: Gauges) -> None:
    """Nothing is believed that is not there: a backend says nothing of its cache before its first prompt."""
    requests, blocks = found.get(REQUESTS, {}), found.get(BLOCKS, {})
    if "active" not in requests:
        return
    waiting = max(int(requests.get("waiting", 0)), 0)
    view = replica.view
    replica.counted(max(int(requests["active"]) - waiting, 0), waiting)
    if blocks.get("max", 0) > 0:
        view.blocks, view.free_blocks = int(blocks["max"]), int(min(blocks.get("free", 0), blocks["max"]))
        view.tokens_per_block = int(blocks.get("tokens_per", 0)) or view.tokens_per_block
