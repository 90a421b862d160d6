"""How long planning takes: `python -m llmops.perf.lab.benchmarks.plan_speed`.

One model at a time, and a search over one and four kinds and 64 GPUs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from llmops.build.formats import FORMATS
from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpus import find_gpu
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.search.search import search
from llmops.build.plan.speed.workload import Workload
from llmops.build.plan.timing.choose import op_times

MODELS = Path(__file__).parents[1] / "published" / "models.json"
KINDS = ("h100-sxm", "h200-sxm", "b200-sxm", "l40s")
LOAD = Workload(3000, 400, qps=5, ttft_p95=2.0, tpot_p95=0.1)


def seconds(model: str, kinds: tuple[str, ...]) -> tuple[float, float]:
    """Wall and CPU seconds of one search, tables read anew."""
    config = Architecture.from_hf_config(json.loads(MODELS.read_text())[model])
    gpus = tuple(find_gpu(kind) for kind in kinds)
    wall, cpu = time.perf_counter(), time.process_time()
    search(PlanRequest(model, config, FORMATS["fp8"], "fp8", LOAD, gpus), op_times)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print the table."""
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
    for model in ("llama-3.1-70b", "mixtral-8x22b", "llama-3.1-405b"):
        for kinds in (KINDS[:1], KINDS):
            wall, cpu = seconds(model, kinds)
            print(
                f"{model:16} {len(kinds)} kind{'s' * (len(kinds) > 1)}, up to 64 GPUs: {wall:5.1f} s ({cpu:.1f} s CPU)"
            )


if __name__ == "__main__":
    main()
