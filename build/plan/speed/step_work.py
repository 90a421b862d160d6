"""Compute the work of an engine step: the operations of StepModel in FLOPs and bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from llmops.build.model.architecture import Architecture
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.speed.step_time import StepModel
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape
from llmops.build.plan.timing.roofline import decode_work, gemm_work, moe_work, prefill_work
from llmops.build.quant_formats import QuantFormat

#: Shorter of the two cache lengths, in tokens, whose difference gives the cost of a cached token.
SHORT = 1
#: Longer of the two cache lengths, in tokens, whose difference gives the cost of a cached token.
LONG = 1025


@dataclass(frozen=True)
class WorkAmount:
    """An amount of FLOPs or bytes, as a linear function.

    The amount is `step` per step, plus `token` per token read or generated, plus `cached` per token
    in the KV cache of the step's sequences.
    """

    step: float
    token: float
    cached: float


@dataclass(frozen=True)
class StepWork:
    """The work of an engine step, on all GPUs of a replica together."""

    flops: WorkAmount
    bytes: WorkAmount


def step_work(model: Architecture, precision: QuantFormat, kv: str, layout: ParallelLayout, batch: int) -> StepWork:
    """Return the work of a step with `batch` sequences, which decide how many experts are read."""

    def amount(counted: int) -> WorkAmount:
        steps = StepModel(model, precision, kv, layout, _CountingTimes(counted))
        return _fitted(lambda size, length: layout.gpus * steps.seconds(size, length), max(batch, 1))

    return StepWork(amount(_FLOPS), amount(_BYTES))


def _fitted(total: Callable[[int, int], float], batch: int) -> WorkAmount:
    """Return the linear function that passes through the amounts of three different steps.

    `total` returns the amount of a step by its number of sequences and by the number of tokens that
    each sequence has in the KV cache. The steps have `batch` or twice as many sequences.
    """
    once, twice, longer = total(batch, SHORT), total(2 * batch, SHORT), total(batch, LONG)
    cached = (longer - once) / ((LONG - SHORT) * batch)
    each = (twice - once) / batch
    return WorkAmount(once - each * batch, each - SHORT * cached, cached)


#: Indices of FLOPs and of bytes in the tuples that the roofline's work functions return.
_FLOPS, _BYTES = 0, 1


class _CountingTimes:
    """Operation times that are FLOPs or bytes instead of seconds.

    Transfers between GPUs count zero, because they are neither arithmetic nor memory traffic.
    """

    label = "work"

    def __init__(self, counted: int) -> None:
        self._counted = counted

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        return gemm_work(m, n, k, precision)[:2][self._counted]

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        return prefill_work(prompts, tokens, prefix, attention)[self._counted]

    def decode(self, batch: int, length: int, attention: AttentionShape) -> float:
        return decode_work(batch, length, attention)[self._counted]

    def moe(self, tokens: int, experts: ExpertsShape, precision: str) -> float:
        return moe_work(tokens, experts, precision)[:2][self._counted]

    def memory(self, bytes_: float) -> float:
        return bytes_ if self._counted == _BYTES else 0.0

    def all_reduce(self, values: int, ranks: int) -> float:
        return 0.0

    def send(self, bytes_: float, nodes: bool) -> float:
        return 0.0
