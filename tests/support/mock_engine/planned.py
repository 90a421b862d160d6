"""The mock engine's step times and cache as `llmops plan` has them for a model on GPUs."""

from dataclasses import asdict, dataclass
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory import kv_sizes
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.search.candidate import fit_layout
from llmops.build.plan.search.plan_request import DEFAULT_NUM_TOKENS, PlanRequest
from llmops.build.plan.speed.step_time import Prefill, StepModel
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.plan.timing.silicon import timing_source
from llmops.build.quant_formats import FORMATS
from tests.support.mock_engine.llmops_engine.runtimes.step_times import StepTable

TOKENS_PER_BLOCK = 32
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (1, 512, 2048, 8192, 32768)
CHUNKS = (1, 64, 256, 512, 1024, 2048, 4096, 8192)
PREFIXES = (0, 1024, 4096, 16384)
# what reading prompts adds hardly depends on what decodes beside it: taken with so many sequences of that length
BESIDE = (32, 2048)


@dataclass(frozen=True)
class Paged:
    """The options of `make_mock_engine` for an engine with a KV cache (see PagedOptions).

    Attributes:
        noise: Standard deviation of the logarithm of a step's time.
    """

    steps: StepTable
    blocks: int
    max_batch_size: int = 256
    max_num_tokens: int = DEFAULT_NUM_TOKENS
    tokens_per_block: int = TOKENS_PER_BLOCK
    noise: float = 0.0

    def options(self) -> dict[str, Any]:
        """Return the options as JSON for the engine."""
        fields = asdict(self)
        del fields["max_batch_size"]
        return fields


def constant(step: float, per_prompt_token: float, blocks: int, per_sequence: float = 0.0, **limits: int) -> Paged:
    """Steps of `step` seconds, and so much more for each token of a prompt that is read and each sequence beside."""
    batches, chunks = (0, 1000), (0, 1000)
    decode = [[step + batch * per_sequence] for batch in batches]
    read = [[chunk * per_prompt_token] for chunk in chunks]
    table = StepTable(batches, (1,), decode, chunks, (0,), [[step + row[0]] for row in read], read)
    return Paged(table, blocks, **limits)


def planned(model: str, gpu: str, tp: int = 1, precision: str = "fp8", **limits: int) -> Paged:
    """`model` as `llmops plan` takes it, such as meta-llama/Llama-3.1-8B, on `tp` GPUs. Batch and cache are what fits,
    unless `limits` say less."""
    checkpoint: Checkpoint = look_up_model(model).checkpoint
    architecture = checkpoint.architecture
    kind, layout = find_gpu(gpu), ParallelLayout(tp)
    request = PlanRequest(model, architecture, FORMATS[precision], precision, PlanWorkload(3000, 400), (kind,))
    fitted = fit_layout(request, kind, layout, timing_source(kind))
    blocks = fitted.memory.kv_cache // (TOKENS_PER_BLOCK * _token_bytes(architecture, request.kv, layout))
    batch = min(fitted.limits.max_batch_size, BATCHES[-1])
    found = Paged(tabulated(fitted.replica.steps), blocks, batch, request.num_tokens)
    return Paged(**{**found.__dict__, **limits})


def _token_bytes(model: Architecture, cache: str, layout: ParallelLayout) -> int:
    size: int = kv_sizes.token_bytes(model, cache, layout)
    return size


def tabulated(steps: StepModel) -> StepTable:
    """The planner's steps at the points of the axes above."""
    plain = steps.seconds(*BESIDE)
    reading = [[Prefill(1, chunk, prefix) for prefix in PREFIXES] for chunk in CHUNKS]
    return StepTable(
        batches=BATCHES,
        lengths=LENGTHS,
        decode=[[steps.seconds(batch, length) for length in LENGTHS] for batch in BATCHES],
        chunks=CHUNKS,
        prefixes=PREFIXES,
        alone=[[steps.seconds(0, 1, one) for one in row] for row in reading],
        added=[[steps.seconds(*BESIDE, one) - plain for one in row] for row in reading],
    )
