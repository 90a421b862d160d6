"""One gateway process against several: `python -m llmops.perf.lab.benchmarks.workers ENGINE`."""

from __future__ import annotations

from pathlib import Path

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.processes import CpuMeter, difference
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.stack import Service, gateway
from llmops.perf.lab.mock_engine.served import served_mock_engine

PERIOD = 0.002
REQUESTS = 3000
USERS = 64
WORKERS = (1, 2)
# two cores for two workers, Triton and the load generator
GROWTH = 1.2
_COUNTER = r'llmops_requests_total\{route="/v1/chat/completions",'


def measure(engine: Path) -> Section:
    """All figures of this script."""
    text = (
        f"{REQUESTS:,} requests, {USERS} at a time, 64 tokens in, 1 out, nothing streamed; the load generator and "
        "Triton share the machine's cores with the workers."
    )
    section = Section("Workers", "python -m llmops.perf.lab.benchmarks.workers ENGINE", text)
    with section, served_mock_engine(engine, PERIOD) as server:
        rates = {}
        for workers in WORKERS:
            with gateway(server.address, "--workers", str(workers)) as front:
                rates[workers] = _load(front, workers, section)
        section.add("throughput of 2 workers / 1", rates[2] / rates[1], "×", GROWTH, "least")
    return section


def _load(front: Service, workers: int, section: Section) -> float:
    run(front.address, output=1, concurrency=USERS, requests=300, warmup=0, stream=False)
    meter, counted = CpuMeter({"gateway": front.pids}), front.metric(_COUNTER)
    before = meter.read()
    summary = run(front.address, output=1, concurrency=USERS, requests=REQUESTS, warmup=0, stream=False).summary
    used = difference(before, meter.read())
    section.add(f"{workers} workers", summary.requests_per_second, "requests/s")
    section.add(f"{workers} workers: cores they used", used["gateway"] / used["wall"], "cores")
    lost = REQUESTS - (front.metric(_COUNTER) - counted)
    section.add(f"{workers} workers: requests that the metrics of all workers miss", lost, "requests", 0)
    assert not summary.errors, summary.errors
    return summary.requests_per_second


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure the gateway with one and with several workers.")()
