"""Weights by their Hugging Face name, one at a time, whatever file they lie in. Nothing is held after `get`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llmops.build.checkpoint import Checkpoint, TensorInfo
from llmops.build.checkpoint.gguf_checkpoint import block_bits
from llmops.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SAFETENSORS = {"F32": ("f32", np.float32), "F16": ("f16", np.float16), "BF16": ("bf16", np.uint16)}


@dataclass(frozen=True)
class Weight:
    """`data` has the stored bits: float32, float16, or for `element` bf16 the upper halves of float32 as uint16.

    `block_bits` is set where the values came from GGUF blocks of that many bits, and so lie on a coarse grid.
    """

    data: NDArray[Any]
    element: str
    block_bits: int | None = None

    def float32(self) -> NDArray[np.float32]:
        """A copy in float32; exact, also from bfloat16."""
        if self.element == "bf16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32, copy=False)


class WeightSource(Protocol):
    """The weights of one checkpoint. `get` raises CheckpointError for a tensor that is missing or not float."""

    def get(self, name: str) -> Weight: ...

    def has(self, name: str) -> bool: ...


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The source that fits the checkpoint's format."""
    return GgufWeights(checkpoint) if checkpoint.format == "gguf" else SafetensorsWeights(checkpoint)


class SafetensorsWeights:
    """Memory-mapped: a weight that is passed on unchanged never leaves the page cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.maps = {name: np.memmap(checkpoint.location(name), np.uint8, "r") for name in checkpoint.weight_files}

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def get(self, name: str) -> Weight:
        info = _find(self.checkpoint, name, name)
        if info.dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"{self.checkpoint.ref}: {name} is stored as {info.dtype}; the openvino target reads "
                f"{', '.join(_SAFETENSORS)}. Use the checkpoint before quantisation."
            )
        element, dtype = _SAFETENSORS[info.dtype]
        raw = self.maps[info.file][info.offset : info.offset + info.nbytes]
        if info.offset % np.dtype(dtype).itemsize:
            raw = np.array(raw)  # older writers do not align the data section
        return Weight(raw.view(dtype).reshape(info.shape), element)


class GgufWeights:
    """Dequantised to float32, which is exact for every GGML block format; F16 and BF16 are kept as they are."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.map = np.memmap(checkpoint.path, np.uint8, "r")
        self.architecture = checkpoint.architecture

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self.checkpoint.tensors

    def get(self, name: str) -> Weight:
        info = _find(self.checkpoint, _gguf_name(name), name)
        weight = self._read(info)
        heads = self._rotary_heads(name)
        return replace(weight, data=_unpermute(weight.data, heads)) if heads else weight

    def _read(self, info: TensorInfo) -> Weight:
        raw = self.map[info.offset : info.offset + info.nbytes]
        if info.dtype in _SAFETENSORS:
            element, dtype = _SAFETENSORS[info.dtype]
            return Weight(np.array(raw).view(dtype).reshape(info.shape), element)
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[info.dtype]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        rows = raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        try:
            values = dequantize(rows, kind).reshape(info.shape)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.checkpoint.ref}: {info.name} is stored as {info.dtype}, "
                "which the gguf package cannot dequantise."
            ) from error
        return Weight(values, "f32", block_bits(info.dtype))

    def _rotary_heads(self, name: str) -> int:
        """GGUF stores q and k of the llama family with interleaved rotary halves; other families as in Hugging Face."""
        if self.checkpoint.metadata.get("general.architecture") != "llama":
            return 0
        if ".q_proj." in name:
            return self.architecture.num_heads
        return self.architecture.num_kv_heads if ".k_proj." in name else 0


def _unpermute(data: NDArray[Any], heads: int) -> NDArray[Any]:
    half = data.shape[0] // heads // 2
    split = data.reshape(heads, half, 2, *data.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def _gguf_name(name: str) -> str:
    if match := _LAYER.fullmatch(name):
        return f"blk.{match[1]}.{_GGUF_NAMES[match[2]]}.{match[3]}"
    module, _, kind = name.rpartition(".")
    return f"{_GGUF_NAMES[module]}.{kind}" if module in _GGUF_NAMES else name


def _find(checkpoint: Checkpoint, stored: str, wanted: str) -> TensorInfo:
    if stored not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.ref} has no tensor {wanted}; it is incomplete or not a plain decoder.")
    return checkpoint.tensors[stored]
