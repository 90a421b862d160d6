"""CPU time and latency that Triton and the gateway add to the answers of a mock engine.

Goals on one core of the reference machine: the gateway uses at most 25 µs of CPU per streamed token
and 1 ms per request with an immediate answer, Triton's Python backend at most 15 µs per token, and
the gateway delays the first token by at most 3 ms (median) and 10 ms (p99). CPU is the user and
system time of the processes, not wall-clock time.
"""

from pathlib import Path
from typing import Any

from llmops.perf.lab.figures import Section
from llmops.perf.load.runner import run_async
from llmops.perf.report.document import Document
from llmops.perf.report.summary import Distribution
from tests.support.load import options, run, window
from tests.support.mock_engine.repository import PLAIN
from tests.support.mock_engine.served import mock_engine
from tests.support.processes import CpuMeter, difference
from tests.support.stack import Service

PERIOD = 0.02  # Seconds between two tokens of a stream.
STOPS = ["\n\nUser:", "###"]
#: Seconds to wait until all streams are open, before the measurement begins.
SETTLE = 3.0
#: Seconds over which CPU time is measured once the streams are open.
WINDOW = 6.0
CONDITIONS = "Mock engine at 20 ms per token on the real Triton, gateway and load generator on the same machine."


def cpu_per_token(triton_: Service, gateway_: Service, section: Section, streams: int = 128) -> None:
    """Add to `section` the CPU µs of gateway and Triton per token while `streams` answers run."""
    meter = CpuMeter({"gateway": gateway_.pids, "triton": triton_.pids})
    output = int((SETTLE + WINDOW + 1.0) / PERIOD)
    # The stop string never occurs. Gateways usually search for one, so its cost is measured.
    load = options(
        gateway_.address, output=output, concurrency=streams, requests=streams, warmup=0, extra={"stop": STOPS}
    )
    used, tokens, _ = run_async(window(load, meter, settle=SETTLE, seconds=WINDOW))
    section.add(f"gateway, {streams} streams", 1e6 * used["gateway"] / tokens, "µs/token", 25)
    section.add(f"Triton and its Python backend, {streams} streams", 1e6 * used["triton"] / tokens, "µs/token", 15)
    rate = tokens / used["wall"]
    section.add("tokens/s meanwhile", rate, "tokens/s", 0.98 * streams / PERIOD, "least")


def cpu_per_request(gateway_: Service, section: Section) -> None:
    """Add to `section` the gateway's CPU time per request in ms.

    The requests have 64 prompt tokens and 1 answer token, and are not streamed.
    """
    meter = CpuMeter({"gateway": gateway_.pids})
    run(gateway_.address, output=1, concurrency=16, requests=64, stream=False)
    before = meter.read()
    run(gateway_.address, output=1, concurrency=16, requests=1000, warmup=0, stream=False)
    # The seconds for 1,000 requests equal the milliseconds for one request.
    section.add("gateway, 64 tokens in, 1 out", difference(before, meter.read())["gateway"], "ms/request", 1.0)


def added_latency(triton_: Service, gateway_: Service, section: Section, streams: int = 64, rounds: int = 2) -> None:
    """Add to `section` by how much TTFT and ITL are longer through the gateway than without.

    Runs through the gateway alternate with runs straight to Triton.
    """
    runs: dict[str, list[Document]] = {"gateway": [], "direct": []}
    for _ in range(rounds):
        for name, url in (("gateway", gateway_.address), ("direct", f"grpc://{triton_.address}")):
            # An open loop spreads the requests over time. Requests sent all at once would measure
            # the queue in front of one Python thread.
            load: dict[str, Any] = {"rate": streams / 2.0, "arrival": "poisson", "requests": max(64, streams * 4)}
            runs[name].append(run(url, output=int(2.0 / PERIOD), warmup=8, **load))
    ttft, itl = _pooled(runs, "ttft"), _pooled(runs, "itl")
    section.add(f"added TTFT p50, {streams} streams", ttft["gateway"].p50 - ttft["direct"].p50, "ms", 3)
    section.add(f"added TTFT p99, {streams} streams", ttft["gateway"].p99 - ttft["direct"].p99, "ms", 10)
    section.add(f"added ITL p99, {streams} streams", itl["gateway"].p99 - itl["direct"].p99, "ms", 5)


def _pooled(runs: dict[str, list[Document]], metric: str) -> dict[str, Distribution]:
    found = {}
    for name, documents in runs.items():
        values = [value for document in documents for value in _values(document, metric)]
        distribution = Distribution.of(values)
        assert distribution is not None, f"no answers through {name}"
        found[name] = distribution
    return found


def _values(document: Document, metric: str) -> list[float]:
    done = [r for r in document.records if r["error"] is None and r["first"] is not None]
    if metric == "ttft":
        return [r["first"] - r["start"] for r in done]
    return [b - a for r in done for a, b in zip(r["chunks"], r["chunks"][1:], strict=False)]


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`."""
    with mock_engine(engine, PERIOD) as (triton_, gateway_):
        cpu_per_token(triton_, gateway_, section)
        cpu_per_request(gateway_, section)
    # First tokens come on a grid of 1 ms, so that the wait for the engine's clock does not hide the
    # added latency.
    with mock_engine(engine, PERIOD, first=0.001, text=PLAIN) as (triton_, gateway_):
        added_latency(triton_, gateway_, section)
        added_latency(triton_, gateway_, section, streams=8, rounds=1)
