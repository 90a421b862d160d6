"""The roofline model of an operation's duration.

An operation takes the longer of its arithmetic and its memory traffic, and a launch.
"""

from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape
from llmops.build.quant_formats import FORMATS

# Shares of the peak, between the medians of AIConfigurator's H100 tables on large shapes: matrix
# products 0.54 (FP8) to 0.73 (BF16), attention 0.43 to 0.60 of the BF16 peak, weights read at 0.73
# to 0.83, all-reduce 0.61 to 0.86. Latencies are in seconds.
GEMM_EFFICIENCY = 0.65
ATTENTION_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.75
LINK_EFFICIENCY = 0.70
LAUNCH = 3e-6
ALL_REDUCE_LATENCY = 6e-6
NETWORK_LATENCY = 10e-6


class RooflineTimes:
    """The roofline of a GPU: known for every shape, but coarse, without tile effects and overlap."""

    def __init__(self, gpu: GpuSpec) -> None:
        self.gpu = gpu
        self.label = f"roofline ({gpu.name})"

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        flops, bytes_, compute = gemm_work(m, n, k, precision)
        return self._bound(flops, bytes_, compute, GEMM_EFFICIENCY)

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        flops, bytes_ = prefill_work(prompts, tokens, prefix, attention)
        # FP8 attention kernels stay near what BF16 reaches: soft-max is not done in FP8.
        return self._bound(flops, bytes_, "bf16", ATTENTION_EFFICIENCY)

    def decode(self, batch: int, length: int, attention: AttentionShape) -> float:
        flops, bytes_ = decode_work(batch, length, attention)
        return self._bound(flops, bytes_, "bf16", ATTENTION_EFFICIENCY)

    def moe(self, tokens: int, experts: ExpertsShape, precision: str) -> float:
        flops, bytes_, compute = moe_work(tokens, experts, precision)
        return self._bound(flops, bytes_, compute, GEMM_EFFICIENCY) + LAUNCH

    def all_reduce(self, values: int, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        return self.all_reduce_work(values, ranks) / LINK_EFFICIENCY + ALL_REDUCE_LATENCY

    def all_reduce_work(self, values: int, ranks: int) -> float:
        """Return the seconds of a ring all-reduce at full link speed.

        Each rank sends 2 (n - 1) / n of the message.
        """
        return 2 * values * 2 * (ranks - 1) / ranks / self.gpu.link

    def memory(self, bytes_: float) -> float:
        return bytes_ / (self.gpu.bandwidth * MEMORY_EFFICIENCY) + LAUNCH

    def send(self, bytes_: float, nodes: bool) -> float:
        return bytes_ / (self.gpu.network if nodes else self.gpu.link) / LINK_EFFICIENCY + NETWORK_LATENCY

    def ideal(self, flops: float, bytes_: float, compute: str) -> float:
        """Return the seconds at the peaks of the data sheet, which no kernel beats."""
        return max(flops / self.gpu.flops(compute), bytes_ / self.gpu.bandwidth)

    def _bound(self, flops: float, bytes_: float, compute: str, efficiency: float) -> float:
        arithmetic = flops / (self.gpu.flops(compute) * efficiency)
        return max(arithmetic, bytes_ / (self.gpu.bandwidth * MEMORY_EFFICIENCY)) + LAUNCH


def gemm_work(m: int, n: int, k: int, precision: str) -> tuple[float, float, str]:
    """Return operations, bytes and compute dtype of a linear layer."""
    kind = FORMATS[precision]
    inputs = 2 if kind.compute == "bf16" else 1
    return 2.0 * m * n * k, n * k * kind.bits / 8 + m * k * inputs + 2 * m * n, kind.compute


def prefill_work(prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> tuple[float, float]:
    """Return operations and bytes of causal attention over prompts."""
    seen = min(prefix, attention.window) if attention.window else prefix
    flops = 4.0 * prompts * _pairs(tokens, prefix, attention.window) * attention.heads * attention.head_dim
    bytes_ = prompts * ((seen + tokens) * attention.kv_bytes + 4 * tokens * attention.heads * attention.head_dim)
    return flops, bytes_


def _pairs(tokens: int, prefix: int, window: int) -> float:
    """Return the number of pairs of a new token and a token that it sees, itself included."""
    if not window or prefix + tokens <= window:
        return tokens * prefix + tokens * (tokens + 1) / 2
    growing = max(0, window - prefix)  # tokens that see all tokens before them
    return growing * prefix + growing * (growing + 1) / 2 + (tokens - growing) * window


def decode_work(batch: int, length: int, attention: AttentionShape) -> tuple[float, float]:
    """Return operations and bytes of attention for one new token per sequence."""
    length = min(length, attention.window) if attention.window else length
    width = attention.latent or attention.head_dim
    flops = 4.0 * batch * length * attention.heads * width
    return flops, batch * (length * attention.kv_bytes + 4 * attention.heads * attention.head_dim)


def moe_work(tokens: int, experts: ExpertsShape, precision: str) -> tuple[float, float, str]:
    """Return operations, bytes and compute dtype on one rank if tokens choose experts evenly.

    Few tokens touch few experts.
    """
    kind = FORMATS[precision]
    share = experts.intermediate / experts.tp
    touched = experts.count / experts.ep * (1 - (1 - experts.top_k / experts.count) ** tokens)
    flops = 2.0 * tokens * experts.top_k / experts.ep * 3 * experts.hidden * share
    weights = touched * 3 * experts.hidden * share * kind.bits / 8
    return flops, weights + 4 * tokens * experts.top_k / experts.ep * experts.hidden, kind.compute
