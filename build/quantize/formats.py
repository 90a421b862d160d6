"""The quantisation formats: llmops' name -> ModelOpt preset, TensorRT-LLM algorithm and where it runs.

Sources: TensorRT-LLM `examples/quantization/quantize.py`, `tensorrt_llm/quantization/mode.py`,
`docs/source/features/quantization.md`; ModelOpt 0.47 `modelopt.torch.quantization.config`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmops.build.model.architecture import Architecture
from llmops.errors import InputError

ENGINE, TORCH = "tensorrt", "pytorch"
BOTH = frozenset({ENGINE, TORCH})


@dataclass(frozen=True)
class Format:
    """`preset` is the name in ModelOpt, None where nothing is quantised before the export; `algorithm` TensorRT-LLM's
    QuantAlgo; `bits` per weight; `groups` are how many inputs may share a scale, and must divide every sharded input;
    `calib_limit` caps the number of calibration texts, as NVIDIA's quantize.py does for AWQ."""

    name: str
    preset: str | None
    algorithm: str | None
    bits: int
    targets: frozenset[str]
    groups: tuple[int, ...] = ()
    calibrated: bool = True
    calib_limit: int = 512
    summary: str = ""

    @property
    def grouped(self) -> bool:
        return bool(self.groups)


# Sizes of groups: `cpp/tensorrt_llm/kernels/cutlass_kernels/fpA_intB_gemm/fpA_intB_gemm_template.h`, and for W4A8
# `validate_group_size` of `tensorrt_llm/quantization/functional.py`.
_ALL = (
    Format("none", None, None, 16, BOTH, calibrated=False, summary="weights as they are"),
    Format("fp8", "FP8_DEFAULT_CFG", "FP8", 8, BOTH, summary="E4M3 weights and activations, one scale per tensor"),
    Format("fp8_pc_pt", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "FP8_PER_CHANNEL_PER_TOKEN", 8, BOTH,
           summary="E4M3, a scale per output channel and per token"),
    Format("int4_awq", "INT4_AWQ_CFG", "W4A16_AWQ", 4, BOTH, groups=(128, 64), calib_limit=32,
           summary="4-bit weights in groups, activation-aware"),
    Format("w4a8_awq", "W4A8_AWQ_BETA_CFG", "W4A8_AWQ", 4, BOTH, groups=(128,), calib_limit=32,
           summary="4-bit weights in groups, FP8 activations"),
    Format("int8_sq", "INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL", 8, frozenset({ENGINE}),
           summary="SmoothQuant: INT8 weights and activations"),
    Format("int8_wo", "INT8_WEIGHT_ONLY_CFG", "W8A16", 8, BOTH, calibrated=False, summary="INT8 weights per channel"),
    Format("int4_wo", None, "W4A16", 4, frozenset({ENGINE}), calibrated=False,
           summary="4-bit weights per channel, quantised by trtllm-build"),
)  # fmt: skip

FORMATS = {item.name: item for item in _ALL}
# trtllm-build makes these from 16-bit weights, and skips those that are INT8 already (1.2.1
# `tensorrt_llm/models/convert_utils.py`, weight_only_quantize_dict)
QUANTISED_BY_BUILD = frozenset({"int8_wo", "int4_wo"})
_STORED = ("float16", "bfloat16")
KV_CACHES = {ENGINE: ("auto", "fp8", "int8"), TORCH: ("auto", "fp8")}


def format_of(name: str, target: str) -> Format:
    """The format, or InputError naming those that the target has."""
    found = FORMATS.get(name)
    if found is None or target not in found.targets:
        known = ", ".join(item.name for item in _ALL if target in item.targets)
        reason = "is unknown" if found is None else f"does not run on target {target}"
        raise InputError(f"--quant {name} {reason}; use one of {known}.")
    return replace(found, preset=None) if target == ENGINE and name in QUANTISED_BY_BUILD else found


def check_kv_cache(kv_cache: str, target: str) -> None:
    """`auto` keeps the model's dtype. INT8 caches exist in TensorRT engines only."""
    if kv_cache not in KV_CACHES[target]:
        raise InputError(
            f"--kv-cache {kv_cache} does not run on target {target}; use one of {', '.join(KV_CACHES[target])}."
        )


def stored_dtype(arch: Architecture, wanted: object = None) -> str:
    """float16 or bfloat16: what weights that are not quantised are stored in; float32 sources become float16.
    `wanted` is what `--set dtype` says. Raises InputError."""
    if wanted is not None and wanted not in _STORED:
        raise InputError(f"--set dtype={wanted}: weights are stored in {' or '.join(_STORED)}.")
    return str(wanted) if wanted else arch.dtype if arch.dtype in _STORED else "float16"
