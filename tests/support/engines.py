"""The real engine that tests and benchmarks share: SmolLM2 on OpenVINO, built once per checkout."""

from __future__ import annotations

import fcntl
from pathlib import Path

ROOT = Path(__file__).parents[2]


def smollm2_engine() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in float32 below .cache/test-engines. Build it if it is missing.

    A lock file lets only one of several test processes build.
    """
    from llmops.build.job.build_engine import build
    from llmops.build.spec import BuildSpec

    output = ROOT / ".cache" / "test-engines" / "smollm2-none"
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output.parent / "smollm2-none.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(BuildSpec(checkpoint="smollm2", output=output, name="smollm2", max_batch_size=64, max_num_tokens=256))
    return output
