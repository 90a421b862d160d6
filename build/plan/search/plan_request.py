"""The request to the planner, checked for contradictions before the search."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmops.build.model.architecture import Architecture
from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.plan.memory.memory_budget import DEFAULT_KV_FRACTION
from llmops.build.plan.search.serving_cost import ApiPrice
from llmops.build.plan.speed.measured_steps import MeasuredSteps
from llmops.build.plan.speed.workload import PlanWorkload
from llmops.build.quant_formats import FORMATS, PLANNED, QuantFormat, format_of_method, planned_format
from llmops.build.target_facts import GPU_TARGETS, TARGETS
from llmops.build.trtllm.flag_rules import paged_context
from llmops.errors import InputError

#: Default of the maximum number of tokens in one engine step: TensorRT-LLM's own default.
DEFAULT_NUM_TOKENS = 8192
ENGINE, TORCH = "tensorrt", "pytorch"


def _only(targets: Iterable[str]) -> str | None:
    """Return the only GPU target among `targets`, or None if `targets` has both.

    trtllm-build has no block-scaled formats. The PyTorch backend has no SmoothQuant, per-channel
    INT4 or INT8 KV cache.
    """
    running = [name for name in GPU_TARGETS if name in targets]
    return running[0] if len(running) == 1 else None


def _only_for_cache(kv: str) -> str | None:
    return _only(name for name in GPU_TARGETS if kv in ("bf16", *TARGETS[name].kv_caches))


def default_target(model: Architecture, precision: QuantFormat, kv: str, ep: int = 1) -> str:
    """Return the default target: tensorrt if it can build the model, otherwise pytorch.

    tensorrt can build the model if its family and precision allow, and `ep` does not distribute
    experts over GPUs.
    """
    if ep > 1:
        return TORCH
    sole_target = _only(precision.targets) or _only_for_cache(kv)
    return sole_target or (ENGINE if ENGINE in model.targets else TORCH)


def find_precision(name: str, model: Architecture) -> QuantFormat:
    """Return the format for a value of `llmops plan --quant`.

    The value `auto` is the checkpoint's own format.

    Raises:
        InputError: The name is unknown. The message lists the known names.
    """
    if name.lower() == "auto":
        return format_of_method(model.quant_method) or FORMATS["none"]
    found = planned_format(name)
    if found is None:
        known = ", ".join(quant_format.label for quant_format in PLANNED.values())
        raise InputError(f"The quantisation {name!r} is unknown; choose one of auto, {known}.")
    return found


#: Number of tokens to whose multiples default sequence lengths are rounded up.
SEQ_LEN_STEP = 1024


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner.

    `gpus` are the kinds of GPU to compare, and `max_gpus` is the largest number of GPUs. `tp`, `pp`
    and `ep` fix a parallel size, or are None. `kv` is bf16, fp8 or int8. `max_seq_len` and
    `max_num_tokens` are in tokens; with None, the planner chooses. An engine that cannot read its
    KV cache in pages during prefill is planned without chunked prefill, also if the workload asks
    for chunked prefill.
    """

    name: str
    model: Architecture
    precision: QuantFormat
    kv: str
    workload: PlanWorkload
    gpus: tuple[GpuSpec, ...]
    target: str = "pytorch"
    max_gpus: int = 64
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    kv_fraction: float = DEFAULT_KV_FRACTION
    disaggregated: bool = True
    api: ApiPrice | None = None
    measured: MeasuredSteps | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        chunked_prefill = self.workload.chunked_prefill
        if self.target == ENGINE and not paged_context(self.precision.name, self.kv):
            self._leave_out_pages()
        self._check_lengths("raise it or drop --no-chunked-prefill" if not chunked_prefill else "raise it")
        if self.target not in self.model.targets:
            others = sorted(self.model.targets.intersection(GPU_TARGETS))
            remedy = (
                f"give --target {' or '.join(others)}" if others else "plan another model: this one runs on CPUs only"
            )
            raise InputError(f"{self.model.hf_class} cannot be built for --target {self.target}; {remedy}.")
        for flag, name, sole_target in (
            ("quant", self.precision.name, _only(self.precision.targets)),
            ("kv-dtype", self.kv, _only_for_cache(self.kv)),
        ):
            if sole_target not in (None, self.target):
                raise InputError(f"--{flag} {name} runs on --target {sole_target} only; change one of them.")
        if not 0 < self.kv_fraction < 1:
            raise InputError(
                f"--kv-fraction {self.kv_fraction:g} is not a share of the free memory; give a number above 0 and "
                "below 1."
            )

    def _check_sizes(self) -> None:
        for flag, size in (("gpus", self.max_gpus), ("tp", self.tp), ("pp", self.pp), ("ep", self.ep)):
            if size is not None and size < 1:
                raise InputError(f"--{flag} {size} is too small; give at least 1.")
        pinned = (self.tp or 1) * (self.pp or 1)
        if pinned > self.max_gpus:
            raise InputError(
                f"--tp {self.tp or 1} x --pp {self.pp or 1} needs {pinned} GPUs, but --gpus is {self.max_gpus}; "
                "raise --gpus, or lower --tp or --pp."
            )
        if self.ep and self.ep > 1 and self.model.moe is None:
            raise InputError(f"--ep {self.ep}: {self.name} is a dense model, which has no experts; leave --ep out.")
        if self.ep and self.ep > 1 and self.target == ENGINE:
            raise InputError(
                f"--ep {self.ep} runs on --target pytorch only: TensorRT engines split each expert over all GPUs. "
                "Change one of them."
            )
        if self.ep and self.tp and self.tp % self.ep:
            raise InputError(
                f"--ep {self.ep} must divide --tp {self.tp}: experts are distributed over the tensor-parallel ranks."
            )

    def _leave_out_pages(self) -> None:
        if self.workload.prefix_hit:
            raise InputError(
                f"--prefix-hit: an engine of {self.precision.name} weights with an {self.kv} KV cache does not reuse "
                "prefixes; use --kv-dtype bf16 or --target pytorch, or leave --prefix-hit out."
            )
        object.__setattr__(self, "workload", replace(self.workload, chunked_prefill=False))

    def _check_lengths(self, remedy: str) -> None:
        limit, longest = self.model.max_position_embeddings, self.workload.length
        if self.max_seq_len is not None and self.max_seq_len > limit:
            raise InputError(
                f"--max-seq-len {self.max_seq_len} is more than the {limit} positions of {self.name}; lower "
                "--max-seq-len."
            )
        if longest > limit:
            raise InputError(
                f"--isl {self.workload.isl} + --osl {self.workload.osl} is {longest} tokens, more than the {limit} "
                f"positions of {self.name}; lower --isl or --osl."
            )
        if self.max_seq_len is not None and longest > self.max_seq_len:
            raise InputError(
                f"--isl {self.workload.isl} + --osl {self.workload.osl} is {longest} tokens, more than "
                f"--max-seq-len {self.max_seq_len}; raise --max-seq-len, or lower --isl or --osl."
            )
        if self.max_num_tokens is not None and self.max_num_tokens < 1:
            raise InputError(f"--max-num-tokens {self.max_num_tokens} is too small; give at least 1.")
        if not self.workload.chunked_prefill and (self.max_num_tokens or self.workload.isl) < self.workload.isl:
            raise InputError(
                f"--max-num-tokens {self.max_num_tokens} cannot hold a prompt of {self.workload.isl} tokens without "
                f"chunked prefill; {remedy}."
            )

    @property
    def expert_split(self) -> int | None:
        """Return the only value of `ep` to try, or None to try all values.

        The value is the requested one, or 1 if the target supports no other value.
        """
        return self.ep or (1 if self.target == ENGINE else None)

    @property
    def seq_len(self) -> int:
        """Return the maximum sequence length of the engine, in tokens.

        The result is the requested length, or else the sum of the mean lengths, rounded up.
        """
        rounded = -(-self.workload.length // SEQ_LEN_STEP) * SEQ_LEN_STEP
        return self.max_seq_len or min(rounded, self.model.max_position_embeddings)

    @property
    def num_tokens(self) -> int:
        """Return the maximum number of tokens in one engine step.

        Without chunked prefill the longest prompt must fit in one step.
        """
        if self.max_num_tokens:
            return self.max_num_tokens
        return DEFAULT_NUM_TOKENS if self.workload.chunked_prefill else max(DEFAULT_NUM_TOKENS, self.seq_len)
