"""Errors of the planner's predictions compared with NVIDIA's published throughput.

Goals: for the Llama and Mistral rows of each GPU, a median error of at most 10 % and a maximum of
20 %; for GPT-OSS, 15 % and 35 %. The two host-side constants of `llmops.build.plan.speed.step_time`
were fitted to all H100 rows together, without constants per row or model. The H200, A100, GPT-OSS
and release 1.2 rows were not used for the fit.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.search.candidate import MAX_BATCH, LayoutRejected, fit_layout
from llmops.build.plan.search.plan_request import PlanRequest
from llmops.build.plan.speed.replica_model import ReplicaModel
from llmops.build.plan.speed.step_time import Prefill
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.operation_times import OperationTimes
from llmops.build.plan.timing.silicon import timing_source
from llmops.build.quant_formats import FORMATS
from llmops.perf.lab.figures import Section

DATA = Path(__file__).parent / "published"
# Number of requests of each run by (prompt, answer) tokens, as published. The number for (1024,
# 2048) is an assumption, because the page does not list it.
REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (1024, 2048): 1500, (1024, 8192): 1500, (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500,
    (8192, 1024): 1500, (20000, 2000): 1000, (32768, 1024): 1000,
}  # fmt: skip
KV_FRACTION = 0.95
#: Largest acceptable median and maximum error in percent. GPT-OSS has wider goals, because it was
#: not used for the fit.
GOALS, GOALS_MOE = (10.0, 20.0), (15.0, 35.0)
# Batch sizes of the CUDA graphs that the PyTorch backend captured in a release's runs, from the
# published options. Runs of compiled engines have no graphs.
GRAPHS = {"1.2": (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048)}
CONDITIONS = "Times measured on silicon where there are any."


@dataclass(frozen=True)
class Row:
    """A published throughput (output tokens/s) and the planner's prediction.

    The prediction is None if the model does not fit according to the planner.
    """

    release: str
    gpu: str
    model: str
    quantisation: str
    tp: int
    isl: int
    osl: int
    published: float
    predicted: float | None = None

    @property
    def group(self) -> str:
        """Return the name of the group of rows whose errors are reported together.

        A GPU's Llama, Mistral and Mixtral rows are one group, and its GPT-OSS rows are another.
        """
        return "GPT-OSS" if self.model.startswith("gpt-oss") else f"{self.gpu}, Llama and Mistral"

    @property
    def error(self) -> float:
        return (self.predicted or 0.0) / self.published - 1


def published() -> Iterator[Row]:
    """Yield a row without a prediction for each line of throughput.csv."""
    with (DATA / "throughput.csv").open() as file:
        for line in csv.DictReader(file):
            tp, isl, osl = (int(line[name]) for name in ("tp", "isl", "osl"))
            rate = float(line["output_tokens_per_second"])
            yield Row(line["release"], line["gpu"], line["model"], line["quantisation"], tp, isl, osl, rate)


def predict(row: Row, times: OperationTimes) -> Row:
    """Return the row with the tokens/s that the planner predicts for the published run.

    The run starts with all requests in the queue.
    """
    config = json.loads((DATA / "models.json").read_text())[row.model]
    precision = FORMATS[row.quantisation]
    request = PlanRequest(
        row.model, Architecture.from_hf_config(config), precision, precision.kv, PlanWorkload(row.isl, row.osl),
        (find_gpu(row.gpu),), kv_fraction=KV_FRACTION, max_seq_len=row.isl + row.osl,
    )  # fmt: skip
    try:
        replica = fit_layout(request, find_gpu(row.gpu), ParallelLayout(row.tp), times).replica
    except LayoutRejected:
        return row
    replica.steps.graphs = GRAPHS.get(row.release, ())
    rate = finite_run(replica, REQUESTS[row.isl, row.osl])
    return replace(row, predicted=rate)


def finite_run(replica: ReplicaModel, requests: int) -> float:
    """Return the predicted output tokens/s of a run with a fixed number of requests.

    The requests run in full batches, followed by a smaller batch of the remaining requests.
    """
    osl = replica.workload.osl
    batch = min(replica.full_batch, MAX_BATCH, requests)
    waves, rest = divmod(requests, batch)
    seconds = waves * wave_seconds(replica, batch) + (wave_seconds(replica, rest) if rest >= 1 else 0.0)
    return requests * osl / seconds


def wave_seconds(replica: ReplicaModel, batch: float) -> float:
    """Return the seconds of one batch from its first prompt to its last token.

    All requests have the same lengths and start in the queue. So sequences end together, and the
    prompts after them fill whole steps, while the other steps have no prompts.
    """
    load, steps = replica.workload, replica.steps
    size, length = max(1, round(batch)), load.isl + load.osl // 2
    room = max(1, replica.max_num_tokens - size)
    prompts = room // load.isl
    chunk = Prefill(prompts, load.isl) if prompts else Prefill(1, room, (load.isl - room) // 2)
    mixed = batch * load.isl / (chunk.prompts * chunk.tokens)
    if mixed >= load.osl:  # Every step reads prompts.
        return load.osl * replica.at(batch, bursts=False).tpot
    return mixed * steps.seconds(size, length, chunk) + (load.osl - mixed) * steps.seconds(size, length)


def measure(engine: Path, section: Section) -> None:
    """Add to `section` the planner's errors of throughput, in percent.

    The figures are the median and the maximum error of each group of published results.
    """
    times = {row.gpu: timing_source(find_gpu(row.gpu), "auto") for row in published()}
    rows = [predict(row, times[row.gpu]) for row in published()]
    for group in dict.fromkeys(row.group for row in rows):
        errors = [100 * abs(row.error) for row in rows if row.group == group]
        typical, worst = GOALS_MOE if group == "GPT-OSS" else GOALS
        section.add(f"{group}: median error of {len(errors)} rows", median(errors), "%", typical)
        section.add(f"{group}: worst error", max(errors), "%", worst)
