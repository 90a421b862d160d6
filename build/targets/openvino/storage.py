"""How weight matrices are stored in the IR: as they are, or compressed to 8 or 4 bits.

Compression is OpenVINO's own layout (integers, zero points, float16 scales, widened by Convert-Subtract-Multiply),
which the CPU plugin runs without unpacking; the rounding is plain min-max, as nncf's is without data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import openvino as ov
from openvino import op
from openvino import opset13 as ops

from llmops.build.targets.openvino.weights import Weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

Node = Any


class Storage(Protocol):
    """Turns a matrix (out_features, in_features) into a node that yields it in float32."""

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        """`embedding`: the matrix is the token embedding or the output head."""


class AsStored:
    """The checkpoint's own bits; 16-bit floats are widened, which is exact."""

    def __init__(self) -> None:
        # An ov.Tensor over a numpy array does not keep the array alive.
        self._shared: list[NDArray[Any]] = []

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        if weight.element == "f32":
            return op.Constant(weight.data, shared_memory=True)
        kind = ov.Type.bf16 if weight.element == "bf16" else ov.Type.f16
        self._shared.append(weight.data)
        tensor = ov.Tensor(weight.data, ov.Shape(weight.data.shape), kind)
        return ops.convert(op.Constant(tensor, shared_memory=True), "f32")


class Int8:
    """Unsigned 8 bits, one scale and zero point per output channel."""

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        values = weight.float32()
        low, high = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
        scale = _scale(low, high, 255)
        zero = np.clip(np.round(-low / scale), 0, 255)
        quantised = np.clip(np.round(values / scale) + zero, 0, 255)
        return _widened(_integers(quantised, ov.Type.u8), ops.convert(_integers(zero, ov.Type.u8), "f16"), scale)


@dataclass(frozen=True)
class Int4:
    """Unsigned 4 bits per group of `group_size` inputs; embedding and head stay at 8, they cost the most quality.

    Weights that come from 4-bit GGUF blocks keep their grid: a block's lowest value is rarely a whole number of steps
    from zero, so the zero point is a float16. Rounding it, as is usual, and as is right for weights that lie on no
    grid, would quantise them a second time.
    """

    group_size: int

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        rows, columns = weight.data.shape
        if embedding or columns % self.group_size:
            return Int8().matrix(weight)
        grouped = weight.float32().reshape(rows, columns // self.group_size, self.group_size)
        keep_grid = weight.block_bits is not None and weight.block_bits <= 4 and self.group_size == _GGUF_BLOCK
        wide = _on_grid(grouped) if keep_grid else _rounded(grouped)
        return ops.reshape(wide, ops.constant(np.array([rows, columns], dtype=np.int64)), False)


_GGUF_BLOCK = 32


def _rounded(grouped: NDArray[np.float32]) -> Node:
    low, high = np.minimum(grouped.min(-1, keepdims=True), 0), np.maximum(grouped.max(-1, keepdims=True), 0)
    scale = _scale(low, high, 15)
    zero = np.clip(np.round(-low / scale), 0, 15)
    quantised = np.clip(np.round(grouped / scale) + zero, 0, 15)
    return _widened(_integers(quantised, ov.Type.u4), ops.convert(_integers(zero, ov.Type.u4), "f16"), scale)


def _on_grid(grouped: NDArray[np.float32]) -> Node:
    low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    scale = _scale(low, high, 15)
    zero = (-low / scale).astype(np.float16)
    quantised = np.clip(np.round(grouped / scale + zero.astype(np.float32)), 0, 15)
    return _widened(_integers(quantised, ov.Type.u4), op.Constant(zero), scale)


def _scale(low: NDArray[np.float32], high: NDArray[np.float32], levels: int) -> NDArray[np.float32]:
    # Rounded to float16 first, as it is stored, so that the integers are the best ones for the scale in use.
    scale = ((high - low) / levels).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    return scale


def _widened(integers: Node, zero: Node, scale: NDArray[np.float32]) -> Node:
    """(integers - zero) * scale in float32; `zero` in float16."""
    shifted = ops.subtract(ops.convert(integers, "f16"), zero)
    return ops.convert(ops.multiply(shifted, op.Constant(scale.astype(np.float16))), "f32")


def _integers(values: NDArray[Any], kind: ov.Type) -> op.Constant:
    flat = values.astype(np.uint8).reshape(-1)
    tensor = ov.Tensor(kind, ov.Shape(values.shape))
    tensor.data.reshape(-1)[:] = flat if kind == ov.Type.u8 else _packed(flat)
    return op.Constant(tensor, shared_memory=True)


def _packed(flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit values two to a byte, the first in the lower half."""
    even = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return even[0::2] | (even[1::2] << 4)
