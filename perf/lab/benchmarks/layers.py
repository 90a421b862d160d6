"""Where time and CPU go between client and engine: `python -m llmops.perf.lab.benchmarks.layers ENGINE`.

The same load on each layer of the stack, on the mock engine, so that the engine takes no part in the differences.
"""

from __future__ import annotations

from pathlib import Path

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import run
from llmops.perf.lab.harness.processes import CpuMeter, difference
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.mock_engine.repository import PLAIN
from llmops.perf.lab.mock_engine.served import mock_engine

PERIOD = 0.02
TOKENS = 64
STREAMS, REQUESTS = 8, 48


def measure(engine: Path) -> Section:
    """All figures of this script."""
    text = (
        f"Mock engine at {1e3 * PERIOD:g} ms per token (first tokens on a grid of 1 ms) on the real Triton; "
        f"{STREAMS} streams, 64 tokens in, {TOKENS} out; CPU is the processes' own."
    )
    section = Section("Layers", "python -m llmops.perf.lab.benchmarks.layers ENGINE", text)
    with section, mock_engine(engine, PERIOD, first=0.001, text=PLAIN) as (server, front):
        grpc = f"grpc://{server.address}"
        for name, url, via in (
            ("engine model, gRPC", grpc, "engine"),
            ("ensemble, gRPC", grpc, "ensemble"),
            ("gateway, completions", front.address, "completions"),
            ("gateway, chat", front.address, "chat"),
        ):
            _layer(name, url, via, CpuMeter({"triton": server.pids, "gateway": front.pids}), section)
    return section


def _layer(name: str, url: str, via: str, meter: CpuMeter, section: Section) -> None:
    before = meter.read()
    summary = run(url, output=TOKENS, concurrency=STREAMS, requests=REQUESTS, warmup=STREAMS, via=via).summary
    used = difference(before, meter.read())
    assert summary.ttft is not None, summary.errors
    assert summary.tpot is not None
    tokens = (REQUESTS + STREAMS) * TOKENS
    section.add(f"{name}: TTFT p50", summary.ttft.p50, "ms")
    section.add(f"{name}: TPOT p50", summary.tpot.p50, "ms")
    section.add(f"{name}: CPU of Triton", 1e6 * used["triton"] / tokens, "µs/token")
    if url.startswith("http"):
        section.add(f"{name}: CPU of the gateway", 1e6 * used["gateway"] / tokens, "µs/token")


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure each layer with the tokenizer of ENGINE.")()
