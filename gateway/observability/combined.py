"""One /metrics for all workers of a gateway: whichever is scraped asks the others and adds up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT = 2.0
OWN = "own"


async def combined(own: CollectorRegistry, siblings: Sequence[Path]) -> bytes:
    """Text of `own` plus that of the workers behind the Unix sockets `siblings`; one that is away is left out."""
    texts = [generate_latest(own).decode()]
    if siblings:
        texts += [text for text in await asyncio.gather(*map(_fetch, siblings)) if text]
    return generate_latest(_Sum(texts)) if len(texts) > 1 else texts[0].encode()


async def _fetch(socket: Path) -> str:
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    try:
        async with httpx.AsyncClient(transport=transport, timeout=TIMEOUT) as client:
            return (await client.get(f"http://worker/metrics?{OWN}=1")).text
    except httpx.HTTPError:
        return ""


class _Sum(CollectorRegistry):
    """Counters, gauges and histograms of several expositions, sample by sample."""

    def __init__(self, texts: Iterable[str]) -> None:
        super().__init__()
        self._texts = list(texts)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text):
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
    # a counter's age is that of its oldest part
    return min(known, value) if name.endswith("_created") else known + value
