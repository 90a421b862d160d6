"""Triton's engine model straight over gRPC, without a gateway: `python -m llmops.perf.peers.grpc_client ENGINE`.

One ModelStreamInfer call per request, as Triton's own clients do it; what the gateway's figures are held against.
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from llmops.model_repository.generate import generate_repository, read_engines
from llmops.perf.harness.figures import Section
from llmops.perf.harness.load import run
from llmops.perf.harness.script import script
from llmops.perf.harness.stack import triton

STREAMS = {1: 3, 8: 16, 32: 64}  # concurrency: requests


def measure(engine: Path) -> Section:
    """Tokens/s and TTFT of ENGINE on the real Triton."""
    section = Section(
        "Raw gRPC client", "python -m llmops.perf.peers.grpc_client ENGINE", "64 tokens in, 64 out, greedy; no gateway."
    )
    with section, tempfile.TemporaryDirectory() as folder:
        repository, seeds = Path(folder, "repository"), count(1)
        generate_repository(read_engines([str(engine)]), repository)
        with triton(repository) as server:
            for streams, requests in STREAMS.items():
                load: dict[str, Any] = {
                    "concurrency": streams,
                    "requests": requests,
                    "seed": next(seeds),
                    "extra": {"temperature": 0},
                }
                summary = run(f"grpc://{server.address}", **load).summary
                assert summary.ttft is not None, summary.errors
                section.add(f"{streams} streams", summary.output_tokens_per_second, "tokens/s")
                section.add(f"{streams} streams: TTFT p50", summary.ttft.p50, "ms")
    return section


if __name__ == "__main__":
    script(measure, "ENGINE", "Measure ENGINE on Triton without a gateway.")()
