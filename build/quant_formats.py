"""The table of quantization formats, with all facts that llmops has about each format.

A row without a required fact cannot be constructed. Sources: TensorRT-LLM
`examples/quantization/quantize.py`, `tensorrt_llm/quantization/mode.py`,
`docs/source/features/quantization.md`; ModelOpt 0.47 `modelopt.torch.quantization.config`; the
tables of NVIDIA's AIConfigurator.
"""

from dataclasses import KW_ONLY, dataclass, replace

from llmops.build.target_facts import TARGETS, TargetName
from llmops.errors import InputError

#: Value of `group` for a format with one scale per output channel: larger than any row.
PER_CHANNEL = 1 << 30
_ENGINE: frozenset[TargetName] = frozenset({"tensorrt"})
_TORCH: frozenset[TargetName] = frozenset({"pytorch"})
_OPENVINO: frozenset[TargetName] = frozenset({"openvino"})
_GPU = _ENGINE | _TORCH


@dataclass(frozen=True)
class QualityLimits:
    """The maximum quality loss of a format (see build/quality/quality_gates.py).

    None disables a limit.
    """

    max_ppl_ratio: float | None = None
    min_top1: float | None = None
    max_mean_kl: float | None = None
    max_weight_error: float | None = None
    min_range: float = 0.2


@dataclass(frozen=True)
class FormatRemoval:
    """The removal of a format from TensorRT-LLM, in release line `since`.

    `what` is NVIDIA's name for the format.
    """

    since: tuple[int, int]
    what: str


@dataclass(frozen=True)
class QuantFormat:
    """A quantization format.

    Attributes:
        name: The value of `--quant` and in engine.json.
        summary: The description in the table of docs/quantisation.md.
        targets: Targets that run the format.
        mixtures: Targets that run the format for mixtures of experts.
        bits: Bits per weight.
        group: The number of weights of an output channel that share a scale, None without groups.
        block: The width and height of the blocks of weights that share a scale, None without
            blocks. A tensor without groups and blocks has one scale.
        scale_bytes: Bytes of a scale.
        pre_scale: True if there is a 2-byte factor per input channel (AWQ).
        parts: The quantised linear layers.
        table_bits: Bits of the embedding and the output head.
        compute: The dtype of the arithmetic, with a peak in `build/plan/gpu_specs.py`.
        sm: The oldest GPU with that arithmetic.
        kv: The default dtype of the KV cache.
        gemm: The name in AIConfigurator's tables of GEMMs, None without a measurement.
        moe: The name in AIConfigurator's tables of experts, None without a measurement.
        algorithm: TensorRT-LLM's QuantAlgo.
        made_here: False for formats that come with the checkpoint, or are OpenVINO's own.
        method: The name that transformers gives the format in a checkpoint.
        loss: The default limits of the quality gate.
        equivalent_rounding: The format whose limits apply to a format without limits of its own.
        removal: The TensorRT-LLM release that no longer loads the format.
        aliases: Other names for `llmops plan`.
        preset: ModelOpt's configuration, None if nothing is quantised before the export.
        calibrated: True if the preset needs calibration texts.
        groups: Numbers of inputs that may share a scale; each must divide every sharded input.
        inputs: The `InputRounding.kind` of a layer's inputs, None for none.
        calib_limit: Maximum number of calibration texts, as in NVIDIA's quantize.py for AWQ.
        quantized_by_builder: True if trtllm-build quantises the 16-bit weights of an engine.
            trtllm-build skips weights that are narrow already (1.2.1
            `tensorrt_llm/models/convert_utils.py`, weight_only_quantize_dict).
        gemm_plugin: True if trtllm-build's 16-bit GEMM plugin helps.
        fp8_attention: True if trtllm-build can compute attention over the prompt in FP8.
        blackwell_engine: True if Blackwell runs engines of trtllm-build with the format.
    """

    name: str
    summary: str
    targets: frozenset[TargetName]
    bits: int
    compute: str
    _: KW_ONLY
    algorithm: str | None
    made_here: bool
    gemm: str | None
    moe: str | None
    loss: QualityLimits | None
    preset: str | None = None
    calibrated: bool = False
    groups: tuple[int, ...] = ()
    inputs: str | None = None
    calib_limit: int = 512
    quantized_by_builder: bool = False
    mixtures: frozenset[TargetName] = frozenset()
    sm: int = 80
    group: int | None = None
    block: int | None = None
    scale_bytes: float = 0
    pre_scale: bool = False
    kv: str = "bf16"
    parts: frozenset[str] = frozenset({"attention", "mlp", "experts"})
    table_bits: int = 16
    method: str = ""
    equivalent_rounding: str = ""
    removal: FormatRemoval | None = None
    aliases: tuple[str, ...] = ()
    gemm_plugin: bool = False
    fp8_attention: bool = False
    blackwell_engine: bool = False

    @property
    def label(self) -> str:
        """Return the name of the format in plans and reports."""
        return "bf16" if self.name == "none" else self.name

    @property
    def as_stored(self) -> bool:
        """Return True if the format exists only in published checkpoints, built unchanged."""
        return not self.made_here and bool(self.method)

    @property
    def grouped(self) -> bool:
        """Return True if groups of inputs share a scale, whose size --group-size sets."""
        return bool(self.groups)

    def linear_bytes(self, inputs: int, outputs: int, part: str, dtype_bytes: int) -> int:
        """Return the bytes of a weight matrix [outputs, inputs] with its scales.

        Linear layers of a `part` outside `parts` are not quantised, and take `dtype_bytes` bytes
        per weight.
        """
        if part not in self.parts or self.bits == 16:
            return inputs * outputs * dtype_bytes
        weights = inputs * outputs * self.bits // 8
        return weights + self._scales(inputs, outputs) + (2 * inputs if self.pre_scale else 0)

    def table_bytes(self, rows: int, width: int, dtype_bytes: int) -> int:
        """Return the bytes of `rows` rows of the embedding or the output head in this format.

        A row has `width` weights of `dtype_bytes` bytes each, or of 8 bits with a scale and a zero
        point per row.
        """
        return rows * width * dtype_bytes if self.table_bits == 16 else rows * (width + 3)

    def _scales(self, inputs: int, outputs: int) -> int:
        if self.block:
            return int(-(-inputs // self.block) * -(-outputs // self.block) * self.scale_bytes)
        if self.group:
            return int(outputs * -(-inputs // self.group) * self.scale_bytes)
        return int(self.scale_bytes)


#: Limits of FP8: 1.5 times the loss of SmolLM2-135M, the smallest model that comes with llmops
#: (docs/quantisation.md has the figures). Larger models lose less.
_FP8_LOSS = QualityLimits(max_ppl_ratio=1.08, min_top1=0.81, max_mean_kl=0.10, max_weight_error=0.1)
# The sizes of groups are from
# `cpp/tensorrt_llm/kernels/cutlass_kernels/fpA_intB_gemm/fpA_intB_gemm_template.h`, and for W4A8
# `validate_group_size` of `tensorrt_llm/quantization/functional.py`.
_ALL = (
    QuantFormat(
        "none", "weights as they are", _GPU | _OPENVINO, 16, "bf16", mixtures=_GPU, algorithm=None,
        made_here=True, gemm="bfloat16", moe="bfloat16",
        loss=QualityLimits(max_ppl_ratio=1.002, min_top1=0.98, max_mean_kl=0.0005, max_weight_error=0.005),
        aliases=("bf16", "fp16", "bfloat16", "float16"), gemm_plugin=True, blackwell_engine=True,
    ),
    QuantFormat(
        "fp8", "E4M3 weights and activations, one scale per tensor", _GPU, 8, "fp8", mixtures=_GPU, algorithm="FP8",
        made_here=True, preset="FP8_DEFAULT_CFG", calibrated=True, inputs="e4m3", gemm="fp8", moe="fp8", loss=_FP8_LOSS,
        sm=89, scale_bytes=8, kv="fp8", fp8_attention=True, blackwell_engine=True,
    ),
    QuantFormat(
        "fp8_pc_pt", "E4M3, a scale per output channel and per token", _GPU, 8, "fp8",
        algorithm="FP8_PER_CHANNEL_PER_TOKEN",
        made_here=True, preset="FP8_PER_CHANNEL_PER_TOKEN_CFG", calibrated=True, inputs="e4m3_token",
        gemm="fp8", moe=None,
        loss=_FP8_LOSS, sm=89, group=PER_CHANNEL, scale_bytes=4, kv="fp8",
    ),
    QuantFormat(
        "fp8_block", "E4M3 in blocks of 128 x 128, as published", _TORCH, 8, "fp8", method="fp8",
        algorithm="FP8_BLOCK_SCALES", made_here=False, gemm="fp8_block", moe="fp8_block", loss=_FP8_LOSS, sm=89,
        block=128, scale_bytes=4,
    ),
    QuantFormat(
        "int4_awq", "4-bit weights in groups, activation-aware", _GPU, 4, "bf16", mixtures=_ENGINE,
        algorithm="W4A16_AWQ",
        made_here=True, preset="INT4_AWQ_CFG", calibrated=True, groups=(128, 64), calib_limit=32,
        gemm="int4_wo", moe=None,
        loss=QualityLimits(max_ppl_ratio=1.6, min_top1=0.6, max_mean_kl=0.6, max_weight_error=0.35), group=128,
        scale_bytes=2,
        pre_scale=True, method="awq", aliases=("int4",), gemm_plugin=True,
    ),
    QuantFormat(
        "w4a8_awq", "4-bit weights in groups, FP8 activations", _GPU, 4, "fp8", mixtures=_TORCH, algorithm="W4A8_AWQ",
        made_here=True, preset="W4A8_AWQ_BETA_CFG", calibrated=True, groups=(128,), inputs="e4m3", calib_limit=32,
        gemm=None, moe="w4afp8",
        loss=QualityLimits(max_ppl_ratio=1.6, min_top1=0.6, max_mean_kl=0.6, max_weight_error=0.35,
        min_range=0.09), sm=89,
        group=128, scale_bytes=2, pre_scale=True, kv="fp8", gemm_plugin=True, fp8_attention=True,
    ),
    # SmoothQuant has wide limits: it moves the outliers of the inputs into the weights, whose other
    # columns then round coarsely, and gives every input its own range, also inputs that the
    # calibration texts hardly use.
    QuantFormat(
        "int8_sq", "SmoothQuant: INT8 weights and activations", _ENGINE, 8, "int8", algorithm="W8A8_SQ_PER_CHANNEL",
        made_here=True, preset="INT8_SMOOTHQUANT_CFG", calibrated=True, inputs="int8", gemm="sq", moe=None,
        loss=QualityLimits(max_ppl_ratio=1.14, min_top1=0.70, max_mean_kl=0.23, max_weight_error=0.65, min_range=0.09),
        group=PER_CHANNEL, scale_bytes=4, gemm_plugin=True,
    ),
    QuantFormat(
        "int8_wo", "INT8 weights per channel", _GPU, 8, "bf16", mixtures=_ENGINE, algorithm="W8A16",
        made_here=True, preset="INT8_WEIGHT_ONLY_CFG", quantized_by_builder=True, gemm="int8_wo", moe=None,
        loss=QualityLimits(max_ppl_ratio=1.02, min_top1=0.92, max_mean_kl=0.01, max_weight_error=0.15),
        group=PER_CHANNEL,
        scale_bytes=2, removal=FormatRemoval((1, 3), "INT8 weight-only"), aliases=("int8",), gemm_plugin=True,
    ),
    QuantFormat(
        "int4_wo", "4-bit weights per channel", _ENGINE, 4, "bf16", mixtures=_ENGINE,
        algorithm="W4A16", made_here=True, quantized_by_builder=True, gemm="int4_wo", moe=None,
        loss=QualityLimits(max_ppl_ratio=3.0, min_top1=0.35, max_mean_kl=1.5, max_weight_error=0.6), group=PER_CHANNEL,
        scale_bytes=2, gemm_plugin=True,
    ),
    QuantFormat(
        "mxfp4", "4-bit floats in groups of 32 with a shared exponent, experts only, as published", _TORCH, 4, "bf16",
        method="mxfp4", algorithm="W4A16_MXFP4", made_here=False, gemm=None, moe="w4a16_mxfp4", loss=None, group=32,
        scale_bytes=1, parts=frozenset({"experts"}),
    ),
    # Formats of OpenVINO have a float16 scale and an integer zero point. Embedding and output head
    # are in 8 bits.
    QuantFormat(
        "int8", "unsigned 8 bits per channel", _OPENVINO, 8, "bf16", algorithm=None, made_here=False,
        gemm=None, moe=None,
        loss=None, equivalent_rounding="int8_wo", group=PER_CHANNEL, scale_bytes=3, table_bits=8,
    ),
    QuantFormat(
        "int4", "unsigned 4 bits in groups", _OPENVINO, 4, "bf16", algorithm=None, made_here=False, gemm=None, moe=None,
        loss=None, equivalent_rounding="int4_wo", group=128, scale_bytes=2.5, table_bits=8,
    ),
)  # fmt: skip
FORMATS: dict[str, QuantFormat] = {quant_format.name: quant_format for quant_format in _ALL}
#: Formats that `llmops plan` can plan for, by name.
PLANNED = {name: quant_format for name, quant_format in FORMATS.items() if not quant_format.targets <= _OPENVINO}
_ALIASES = {alias: quant_format.name for quant_format in _ALL for alias in quant_format.aliases}


#: SM numbers of GPUs for which TensorRT-LLM has no kernels of a format, by the format: for linear
#: layers, and for experts. Sources, the same in 1.2 and 1.3:
#: `cpp/tensorrt_llm/kernels/cutlass_kernels/fp8_rowwise_gemm/fp8_rowwise_gemm_template.h`,
#: dispatchToArch, and the hardware matrix of 1.3.0rc29's quantization.md; for experts
#: `_torch/modules/fused_moe/fused_moe_cutlass.py`, _QUANT_SUPPORT_TABLE, issues #6805 (Qwen3 in
#: fp8_block on an L40) and #6717 (GPT-OSS on an L4), and "W4AFP8 MoE is unsupported" of
#: `quantization.py`.
_NO_LINEAR_KERNELS = {"fp8_pc_pt": range(100, 120)}
_NO_EXPERT_KERNELS = {"fp8_block": range(90), "mxfp4": range(90), "w4a8_awq": range(100, 130)}
#: SM number of the first GPU with kernels for latent attention (MLA). Source: 1.3.0rc29's
#: `examples/llm-api/llm_speculative_decoding.py`, run_MTP; `cpp/kernels/fmha_v2/setup.py`,
#: enumerate_kernels. Elsewhere "Deepseek should be supported by fmha in context part" ends workers.
_LATENT_ATTENTION_SM = 90


def missing_kernels(quant_format: QuantFormat, sm: int, has_experts: bool, has_mla: bool) -> str:
    """Return the kernels that TensorRT-LLM lacks on a GPU, such as "fp8_block experts", or "".

    `sm` is the GPU's compute capability, `has_experts` is True for a mixture of experts, and
    `has_mla` for latent attention.
    """
    if has_mla and sm < _LATENT_ATTENTION_SM:
        return "latent attention"
    if sm in _NO_LINEAR_KERNELS.get(quant_format.name, ()):
        return f"{quant_format.name} weights"
    lacks = has_experts and sm in _NO_EXPERT_KERNELS.get(quant_format.name, ())
    return f"{quant_format.name} experts" if lacks else ""


def missing_kv_kernels(kv: str, sm: int, head_dim: int, family: str) -> str:
    """Return the use of an FP8 KV cache that TensorRT-LLM lacks on a GPU, or "".

    `kv` is the dtype of the cache, `sm` the GPU's compute capability, and `head_dim` the width of
    the model's heads.
    """
    if kv != "fp8":
        return ""
    # NVIDIA/TensorRT-LLM #8308 reports "FP8 FMHA cannot be enabled because Context FMHA is not
    # supported" for an engine; the LLM API uses the same AttentionOp (`cpp/tensorrt_llm/thop`).
    if sm == 100 and head_dim == 96:
        return f"FP8 attention for heads of {head_dim}"
    # `_torch/modules/attention.py`: below Blackwell, sparse attention is forward_sparse_mla_kvcache_bf16,
    # which stops at "flash_mla kernel requires KV cache in BFloat16" (NVIDIA/Model-Optimizer #763).
    return "FP8 KV cache for sparse attention" if family == "deepseek_v32" and sm < 100 else ""


def buildable_formats(target: str) -> dict[str, QuantFormat]:
    """Return the formats that `--quant` accepts for a target, by name."""
    return {
        name: quant_format
        for name, quant_format in FORMATS.items()
        if target in quant_format.targets and not quant_format.as_stored
    }


def format_of(name: str, target: str) -> QuantFormat:
    """Return the format `name` with the target's way to build it.

    Raises:
        InputError: The target does not have the format. The message lists the formats of the
            target.
    """
    found = FORMATS.get(name)
    if found is None or name not in buildable_formats(target):
        reason = "is unknown" if found is None or found.as_stored else f"does not run on target {target}"
        raise InputError(f"--quant {name} {reason}; use one of {', '.join(buildable_formats(target))}.")
    if target in _ENGINE and found.quantized_by_builder:
        return replace(found, preset=None)
    return found


def planned_format(name: str) -> QuantFormat | None:
    """Return the format for a value of `llmops plan --quant`, in any case, or None."""
    key = name.lower()
    return PLANNED.get(_ALIASES.get(key, key))


def format_of_algorithm(algorithm: str) -> QuantFormat | None:
    """Return the format of a TensorRT-LLM QuantAlgo, or None."""
    return (
        next((quant_format for quant_format in _ALL if quant_format.algorithm == algorithm), None)
        if algorithm
        else None
    )


def format_of_method(method: str | None) -> QuantFormat | None:
    """Return the format of a checkpoint's `quant_method`, or None."""
    return next((quant_format for quant_format in _ALL if quant_format.method == method), None) if method else None


def removal_reason(name: str, release: tuple[int, int]) -> str | None:
    """Return NVIDIA's name of a format that the TensorRT-LLM release no longer loads, or None.

    The result is None if the release loads the format.
    """
    removal = FORMATS[name].removal if name in FORMATS else None
    return removal.what if removal and release >= removal.since else None


def check_kv_cache(kv_cache: str, target: TargetName) -> None:
    """Raise InputError if the target does not have the KV cache dtype.

    `auto` keeps the model's dtype. Only TensorRT engines have INT8 caches.
    """
    known = TARGETS[target].kv_caches
    if kv_cache not in known:
        raise InputError(f"--kv-cache {kv_cache} does not run on target {target}; use one of {', '.join(known)}.")


if _missing := [one.name for one in _ALL if one.equivalent_rounding and one.equivalent_rounding not in FORMATS]:
    raise ImportError(f"equivalent_rounding names {', '.join(_missing)}, which is not a format.")
if len(FORMATS) != len(_ALL) or FORMATS.keys() & _ALIASES.keys() - {"int8", "int4"}:
    raise ImportError("two formats have the same name.")
