"""Store weight matrices in the IR, unchanged or compressed to 8 or 4 bits.

Compression uses OpenVINO's own layout (integers, zero points, float16 scales, widened by
Convert-Subtract-Multiply), which the CPU plugin runs without unpacking. Rounding is min-max, like
nncf's compression without data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import op
from openvino import opset13 as ops

from llmops.build.checkpoint.weight_sources import Weight

Node = Any


class WeightStorage(Protocol):
    """A storage form of a weight matrix.

    A matrix (out_features, in_features) becomes a node with the matrix in float32.
    """

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        """Return the node of a matrix. `embedding` is True for token embedding and output head."""


_TYPES = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}


class UncompressedStorage:
    """The checkpoint's own numbers. The conversion of 16-bit floats to float32 is exact."""

    def __init__(self) -> None:
        # An ov.Tensor over a numpy array does not keep the array alive, so this object must outlive
        # the model.
        self._shared: list[NDArray[Any]] = []

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        data = weight.float32() if weight.blocks else weight.data
        self._shared.append(data)
        tensor = ov.Tensor(data, ov.Shape(weight.shape), _TYPES[weight.element])
        constant = op.Constant(tensor, shared_memory=True)
        return constant if weight.element == "f32" else ops.convert(constant, "f32")


class Int8Storage:
    """Unsigned 8-bit integers with one scale and zero point per output channel."""

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        return _Affine.of(weight, 255, weight.shape[1], on_grid=False).node(ov.Type.u8)


@dataclass(frozen=True)
class Int4Storage:
    """Unsigned 4-bit integers with one scale and zero point per group of `group_size` inputs.

    Embedding and head stay at 8 bits, because they lose the most quality.

    Weights from 4-bit GGUF blocks keep their values: the lowest value of a block is rarely a whole
    number of steps from zero, so the zero point is a float16. A rounded zero point, which other
    weights get, would quantise these weights a second time.
    """

    group_size: int

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        if embedding or weight.shape[1] % self.group_size:
            return Int8Storage().matrix(weight)
        on_grid = weight.block_bits is not None and weight.block_bits <= 4 and self.group_size == _GGUF_BLOCK
        return _Affine.of(weight, 15, self.group_size, on_grid).node(ov.Type.u4)


#: Number of elements per block of GGUF's 4-bit formats.
_GGUF_BLOCK = 32
#: Number of elements rounded at once, so that temporary arrays are small beside the weights.
_CHUNK = 2 << 20


@dataclass(frozen=True)
class _Affine:
    """A matrix in affine quantisation, with groups along the last axis.

    The values are (integers - zero) * scale. The integers are (rows, groups, group_size), and zero
    and scale (rows, groups, 1).
    """

    integers: NDArray[np.uint8]
    zero: NDArray[Any]
    scale: NDArray[np.float16]

    @classmethod
    def of(cls, weight: Weight, levels: int, group_size: int, on_grid: bool) -> _Affine:
        rows, columns = weight.shape
        groups = columns // group_size
        integers = np.empty((rows, groups, group_size), np.uint8)
        zero = np.empty((rows, groups, 1), np.float16 if on_grid else np.uint8)
        scale = np.empty((rows, groups, 1), np.float16)
        step = max(1, _CHUNK // columns)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            values = weight.float32(part).reshape(-1, groups, group_size)
            integers[part], zero[part], scale[part] = _quantised(values, levels, on_grid)
        return cls(integers, zero, scale)

    def node(self, kind: ov.Type) -> Node:
        """Return a node that dequantizes the matrix to float32, of shape (rows, groups * group_size).

        The integers are stored with the type `kind`.
        """
        whole = self.zero.dtype == np.uint8
        zero = ops.convert(_constant(self.zero, kind), "f16") if whole else op.Constant(self.zero)
        shifted = ops.subtract(ops.convert(_constant(self.integers, kind), "f16"), zero)
        wide = ops.multiply(shifted, op.Constant(self.scale))
        rows, groups, group_size = self.integers.shape
        flat = ops.constant(np.array([rows, groups * group_size], dtype=np.int64))
        return ops.convert(ops.reshape(wide, flat, False), "f32")


def _quantised(
    values: NDArray[np.float32], levels: int, on_grid: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    if not on_grid:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    # The scale is stored as float16. Rounding it first makes the integers the best for the stored
    # scale.
    scale = ((high - low) / levels).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    zero = (-low / scale).astype(np.float16) if on_grid else np.clip(np.round(-low / scale), 0, levels)
    return np.clip(np.round(values / scale + zero.astype(np.float32)), 0, levels), zero, scale


def _constant(values: NDArray[np.uint8], kind: ov.Type) -> op.Constant:
    tensor = ov.Tensor(kind, ov.Shape(values.shape))
    tensor.data.reshape(-1)[:] = values.reshape(-1) if kind == ov.Type.u8 else _packed(values.reshape(-1))
    return op.Constant(tensor, shared_memory=True)


def _packed(flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack two 4-bit values into each byte, the first value in the lower half."""
    even = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return even[0::2] | (even[1::2] << 4)
