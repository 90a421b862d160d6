"""How long planning takes: `python -m llmops.perf.lab.benchmarks.plan_speed`.

One model at a time, and a search over one and four kinds and 64 GPUs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.search.layout_search import search
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.timing_source import timing_source
from llmops.build.quant_formats import FORMATS

MODELS = Path(__file__).parents[1] / "published" / "models.json"
KINDS = ("h100-sxm", "h200-sxm", "b200-sxm", "l40s")
LOAD = PlanWorkload(3000, 400, qps=5, ttft_p95=2.0, tpot_p95=0.1)


def seconds(model: str, kinds: tuple[str, ...]) -> tuple[float, float]:
    """Wall and CPU seconds of one search, tables read anew."""
    config = Architecture.from_hf_config(json.loads(MODELS.read_text())[model])
    gpus = tuple(find_gpu(kind) for kind in kinds)
    wall, cpu = time.perf_counter(), time.process_time()
    search(PlanRequest(model, config, FORMATS["fp8"], "fp8", LOAD, gpus), timing_source)
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
