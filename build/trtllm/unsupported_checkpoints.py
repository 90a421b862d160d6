"""Checkpoints that TensorRT-LLM's PyTorch backend does not load.

The backend supports the family and the algorithm of such a checkpoint, but not together.

A row describes how the weight loader of a release fails on a family and an algorithm, with
upstream's file and function. Paths are in NVIDIA/TensorRT-LLM, below `tensorrt_llm/`. The versions
that were read are before and after 1.2.1, and agree. `docs/tensorrt-llm.md` has the whole table,
and `make matrix` checks it against real exports.
"""

from dataclasses import dataclass

from llmops.build.model.families import FAMILIES

#: 4-bit algorithms that have scales per group of inputs.
_FOUR_BITS = frozenset({"W4A16_AWQ", "W4A8_AWQ"})
_PER_CHANNEL = frozenset({"FP8_PER_CHANNEL_PER_TOKEN", "W8A16"})
_MIXTURES = frozenset(name for name, family in FAMILIES.items() if family.moe is not None)


@dataclass(frozen=True)
class UnsupportedCheckpoint:
    """A combination of families and algorithms with which an engine does not start.

    `reason` completes "TensorRT-LLM does not load this:". `source` names upstream's file, its class
    or function, and the place in the code.
    """

    families: frozenset[str]
    algorithms: frozenset[str]
    reason: str
    source: str


UNSUPPORTED_CHECKPOINTS = (
    UnsupportedCheckpoint(
        _MIXTURES,
        frozenset({"W4A16_AWQ"}),
        "its loader of 4-bit experts wants the input scales of FP8 activations",
        "_torch/modules/fused_moe/fused_moe_cutlass.py CutlassFusedMoE._get_quant_method takes WInt4AFP8FusedMoEMethod "
        "for every per-group INT4; _torch/modules/fused_moe/quantization.py WInt4AFP8FusedMoEMethod.load_quant_scales "
        "reads {expert}.w3.input_scale and {expert}.w3.weight_scale_2",
    ),
    UnsupportedCheckpoint(
        _MIXTURES,
        frozenset({"FP8_PER_CHANNEL_PER_TOKEN"}),
        "its experts have no method for a scale per channel and token",
        "_torch/modules/fused_moe/fused_moe_cutlass.py CutlassFusedMoE._get_quant_method: "
        "'Unsupported quantization mode'",
    ),
    UnsupportedCheckpoint(
        frozenset({"phi3"}),
        _FOUR_BITS,
        "its loader of the packed query, key and value matrix splits rows of weights, where two lie in a byte",
        "_torch/models/modeling_phi3.py Phi3ForCausalLM.load_weights: qkv_weight[:hidden_size, :]; pre_quant_scale is "
        "not handed on",
    ),
    UnsupportedCheckpoint(
        frozenset({"phi3"}),
        _PER_CHANNEL,
        "its loader of the packed query, key and value matrix slices scales as a table of two dimensions",
        "_torch/models/modeling_phi3.py Phi3ForCausalLM.load_weights: qkv_scale[:qk_split_index, :]",
    ),
)


def unsupported_reason(family: str, algorithm: str | None) -> UnsupportedCheckpoint | None:
    """Return the reason for which the PyTorch backend does not load a checkpoint, or None.

    Args:
        family: The family of the checkpoint's model.
        algorithm: The QuantAlgo of the checkpoint, or None if it is not quantised.
    """
    return next(
        (row for row in UNSUPPORTED_CHECKPOINTS if family in row.families and algorithm in row.algorithms), None
    )
