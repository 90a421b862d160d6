"""Triton's engine model straight over gRPC, without a gateway: `python -m llmops.perf.lab.peers.grpc_client ENGINE`.

One ModelStreamInfer call per request, as Triton's own clients do it: the gateway's figures are compared with these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmops.perf.lab.harness.figures import Section
from llmops.perf.lab.harness.load import STREAMS, run
from llmops.perf.lab.harness.script import script
from llmops.perf.lab.harness.stack import engine_on_triton


def measure(engine: Path) -> Section:
    """Tokens/s and TTFT of ENGINE on the real Triton."""
    section = Section(
        "Raw gRPC client",
        "python -m llmops.perf.lab.peers.grpc_client ENGINE",
        "64 tokens in, 64 out, greedy; no gateway.",
    )
    with section, engine_on_triton(engine) as server:
        for seed, (streams, requests) in enumerate(STREAMS.items()):
            load: dict[str, Any] = {
                "concurrency": streams,
                "requests": requests,
                "seed": seed,
                "extra": {"temperature": 0},
            }
            summary = run(f"grpc://{server.address}", **load).summary
            assert summary.ttft is not None, summary.errors
            section.add(f"{streams} streams", summary.output_tokens_per_second, "tokens/s")
            section.add(f"{streams} streams: TTFT p50", summary.ttft.p50, "ms")
    return section


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure ENGINE on Triton without a gateway.")()
