"""The real engines that tests and benchmarks share: SmolLM2 on OpenVINO, built once per checkout."""

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


#: The folder in which `llmops up` looks for SmolLM2 when this is its cache.
UP_CACHE = ROOT / ".cache" / "test-clients" / "cache"
UP_ENGINE = UP_CACHE / "up" / "smollm2-openvino-int8-tp1" / "engine"


def int8_smollm2_engine() -> Path:
    """Return the folder of SmolLM2 as `llmops up` builds it. The command builds it if it is missing."""
    from tests.support import forked_cli

    UP_CACHE.mkdir(parents=True, exist_ok=True)
    with open(UP_CACHE / "engine.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = forked_cli.run("build", "smollm2", "-o", UP_ENGINE, "--quant", "int8")
    assert built.returncode == 0, built.stderr
    return UP_ENGINE
