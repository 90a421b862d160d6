"""One /metrics for all workers of a gateway: whichever is scraped asks the others and adds up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from llmops.gateway.observability.names import REPLICAS, USAGE_LAG

log = logging.getLogger(__name__)

# seconds; Prometheus itself waits for 10, and a worker left out is a counter that falls
TIMEOUT = 8.0
# which all workers say of the same thing
OF_ALL = (USAGE_LAG.name, REPLICAS.name)
OWN = "own"


async def combined(own: CollectorRegistry, siblings: Sequence[Path]) -> bytes:
    """Text of `own` plus that of the workers behind the Unix sockets `siblings`; one that is away, or does not answer
    with metrics, is left out and logged."""
    text = generate_latest(own)
    others = [families for families in await asyncio.gather(*map(_fetch, siblings)) if families]
    if not others:
        return text
    return generate_latest(_Sum([list(text_string_to_metric_families(text.decode())), *others]))


async def _fetch(socket: Path) -> list[Metric]:
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    try:
        async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT) as client:
            answer = await client.get(f"http://worker/metrics?{OWN}=1")
        return list(text_string_to_metric_families(answer.raise_for_status().text))
    except (httpx.HTTPError, ValueError, LookupError) as error:
        # the parser raises what it stumbles over in a text that is none of Prometheus'
        log.warning("the metrics of the worker at %s are left out: %s", socket.name, error or type(error).__name__)
        return []


class _Sum(CollectorRegistry):
    """Counters, gauges and histograms of several expositions, sample by sample."""

    def __init__(self, expositions: Sequence[Sequence[Metric]]) -> None:
        super().__init__()
        self._expositions = expositions

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for exposition in self._expositions:
            for family in exposition:
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                sums = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    sums[key] = _merge(sample.name, sums.get(key), sample.value)
        for name, family in families.items():
            for (sample_name, labels), value in values[name].items():
                family.add_sample(sample_name, dict(labels), value)
            yield family


def _merge(name: str, known: float | None, value: float) -> float:
    if known is None:
        return value
    if name in OF_ALL:
        return max(known, value)
    # a counter's age is that of its oldest part
    return min(known, value) if name.endswith("_created") else known + value
