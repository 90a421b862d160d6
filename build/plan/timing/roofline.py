"""Estimate the durations of operations by the roofline model.

An operation takes the time of its arithmetic or of its memory traffic, whichever is longer, and the
time of a kernel launch.
"""

from llmops.build.plan.gpu_specs import GpuSpec
from llmops.build.plan.timing.operation_times import AttentionShape, ExpertsShape
from llmops.build.quant_formats import FORMATS

# The efficiencies lie between the medians of AIConfigurator's H100 tables on large shapes.
#: Share of the peak that matrix products reach. The medians are 0.54 (FP8) to 0.73 (BF16).
GEMM_EFFICIENCY = 0.65
#: Share of the BF16 peak that attention reaches. The medians are 0.43 to 0.60.
ATTENTION_EFFICIENCY = 0.5
#: Share of the memory bandwidth at which weights are read. The medians are 0.73 to 0.83.
MEMORY_EFFICIENCY = 0.75
#: Share of the link rate that an all-reduce reaches. The medians are 0.61 to 0.86.
LINK_EFFICIENCY = 0.70
#: Seconds to launch a kernel: an estimate.
LAUNCH = 3e-6
#: Seconds that an all-reduce takes in addition to its transfer: an estimate.
ALL_REDUCE_LATENCY = 6e-6
#: Seconds that a transfer between nodes takes in addition to the transmission: an estimate.
NETWORK_LATENCY = 10e-6


class RooflineTimes:
    """Operation times from the roofline of a GPU.

    The roofline gives a time for every shape. The times are coarse, because they leave out the
    effects of tiles and overlap.
    """

    def __init__(self, gpu: GpuSpec) -> None:
        self.gpu = gpu
        self.label = f"roofline ({gpu.name})"

    def gemm(self, m: int, n: int, k: int, precision: str) -> float:
        flops, bytes_, compute = gemm_work(m, n, k, precision)
        return self._bound(flops, bytes_, compute, GEMM_EFFICIENCY)

    def prefill(self, prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> float:
        flops, bytes_ = prefill_work(prompts, tokens, prefix, attention)
        # FP8 attention kernels are hardly faster than BF16 kernels, because soft-max does not run
        # in FP8.
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
        """Return the seconds of a ring all-reduce of `values` 16-bit values at full link speed.

        Each of n ranks sends 2 (n - 1) / n of the message.
        """
        return 2 * values * 2 * (ranks - 1) / ranks / self.gpu.link

    def memory(self, bytes_: float) -> float:
        return bytes_ / (self.gpu.bandwidth * MEMORY_EFFICIENCY) + LAUNCH

    def send(self, bytes_: float, nodes: bool) -> float:
        return bytes_ / (self.gpu.network if nodes else self.gpu.link) / LINK_EFFICIENCY + NETWORK_LATENCY

    def ideal(self, flops: float, bytes_: float, compute: str) -> float:
        """Return the seconds of `flops` FLOPs or `bytes_` bytes at the data sheet's peaks.

        The longer time of both is a lower bound for every kernel that computes in `compute`.
        """
        return max(flops / self.gpu.flops(compute), bytes_ / self.gpu.bandwidth)

    def _bound(self, flops: float, bytes_: float, compute: str, efficiency: float) -> float:
        arithmetic = flops / (self.gpu.flops(compute) * efficiency)
        return max(arithmetic, bytes_ / (self.gpu.bandwidth * MEMORY_EFFICIENCY)) + LAUNCH


def gemm_work(m: int, n: int, k: int, precision: str) -> tuple[float, float, str]:
    """Return the FLOPs, the bytes and the compute dtype of a linear layer.

    The input is [m, k], and the weight [n, k] has the format `precision`.
    """
    kind = FORMATS[precision]
    inputs = 2 if kind.compute == "bf16" else 1
    return 2.0 * m * n * k, n * k * kind.bits / 8 + m * k * inputs + 2 * m * n, kind.compute


def prefill_work(prompts: int, tokens: int, prefix: int, attention: AttentionShape) -> tuple[float, float]:
    """Return the FLOPs and the bytes of causal attention over `prompts` prompts.

    Each prompt has `tokens` new tokens after `prefix` cached tokens.
    """
    seen = min(prefix, attention.window) if attention.window else prefix
    flops = 4.0 * prompts * _pairs(tokens, prefix, attention.window) * attention.heads * attention.head_dim
    bytes_ = prompts * ((seen + tokens) * attention.kv_bytes + 4 * tokens * attention.heads * attention.head_dim)
    return flops, bytes_


def _pairs(tokens: int, prefix: int, window: int) -> float:
    """Return the number of pairs of a new token and a token to which the new token attends.

    Each of `tokens` new tokens attends to itself and to all tokens before it, of which `prefix` are
    cached, or to the last `window` of these tokens if `window` is not 0.
    """
    if not window or prefix + tokens <= window:
        return tokens * prefix + tokens * (tokens + 1) / 2
    growing = max(0, window - prefix)  # Number of new tokens that attend to all tokens before them.
    return growing * prefix + growing * (growing + 1) / 2 + (tokens - growing) * window


def decode_work(batch: int, length: int, attention: AttentionShape) -> tuple[float, float]:
    """Return the FLOPs and the bytes of attention for one new token per sequence.

    Each of `batch` sequences has `length` cached tokens.
    """
    length = min(length, attention.window) if attention.window else length
    width = attention.latent or attention.head_dim
    flops = 4.0 * batch * length * attention.heads * width
    return flops, batch * (length * attention.kv_bytes + 4 * attention.heads * attention.head_dim)


def moe_work(tokens: int, experts: ExpertsShape, precision: str) -> tuple[float, float, str]:
    """Return the FLOPs, the bytes and the compute dtype of one rank's experts.

    Tokens choose experts evenly, so few tokens read the weights of few experts.
    """
    kind = FORMATS[precision]
    share = experts.intermediate / experts.tp
    touched = experts.count / experts.ep * (1 - (1 - experts.top_k / experts.count) ** tokens)
    flops = 2.0 * tokens * experts.top_k / experts.ep * 3 * experts.hidden * share
    weights = touched * 3 * experts.hidden * share * kind.bits / 8
    return flops, weights + 4 * tokens * experts.top_k / experts.ep * experts.hidden, kind.compute
