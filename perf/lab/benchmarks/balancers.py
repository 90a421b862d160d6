"""How much later a first token comes behind HAProxy and Envoy: `python -m llmops.perf.lab.benchmarks.balancers ENGINE`.

The same gateway with the mock engine, asked straight and through each by turns, with the configurations of deploy/.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from llmops.errors import ServerError
from llmops.perf.lab.harness.balancers import balancer, envoy, haproxy
from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.mock_engine.repository import PLAIN
from llmops.perf.lab.mock_engine.served import mock_engine
from llmops.perf.report.summary import Distribution

PERIOD, TOKENS, STREAMS, REQUESTS, ROUNDS = 0.02, 8, 4, 40, 5
READY = 30.0


def measure(engine: Path) -> Section:
    """All figures of this script."""
    text = (
        f"Mock engine (first tokens on a grid of 1 ms) on the real Triton; {ROUNDS} rounds of {REQUESTS} requests, "
        f"{STREAMS} at once, each by turns; a connection is kept open."
    )
    section = Section("Balancers", "python -m llmops.perf.lab.benchmarks.balancers ENGINE", text)
    with section, mock_engine(engine, PERIOD, first=0.001, text=PLAIN) as (_, front), contextlib.ExitStack() as running:
        own = front.address.removeprefix("http://").removesuffix("/v1")
        urls = {"straight": front.address}
        for name, make in (("HAProxy", haproxy), ("Envoy", envoy)):
            folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
            urls[name] = running.enter_context(balancer(make, folder, [own, "127.0.0.1:9"])) + "/v1"
            _wait_ready(urls[name])
        first: dict[str, list[float]] = {name: [] for name in urls}
        for turn in range(ROUNDS):
            for name in sorted(urls, reverse=bool(turn % 2)):
                document = run(urls[name], output=TOKENS, concurrency=STREAMS, requests=REQUESTS, warmup=STREAMS)
                done = [one for one in document.records if one["error"] is None and one["first"] is not None]
                first[name] += [one["first"] - one["start"] for one in done]
        _tell(section, first)
    return section


def _tell(section: Section, first: dict[str, list[float]]) -> None:
    found = {name: Distribution.of(values) for name, values in first.items()}
    straight = found.pop("straight")
    assert straight is not None, "no answers from the gateway itself"
    section.add("first token, straight, p50", straight.p50, "ms")
    section.add("first token, straight, p95", straight.p95, "ms")
    for name, through in found.items():
        assert through is not None, f"no answers through {name}"
        section.add(f"later through {name}, p50", through.p50 - straight.p50, "ms", 5)
        section.add(f"later through {name}, p95", through.p95 - straight.p95, "ms", 5)


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url.removesuffix("/v1") + "/proxy/health", timeout=5).close()
            return
        time.sleep(0.05)
    raise ServerError(f"The balancer at {url} has found no gateway in {READY:g} s.")


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure what HAProxy and Envoy add, with the tokenizer of ENGINE.")()
