"""How weight matrices are stored in the IR: as they are, or compressed to 8 or 4 bits.

Compression is OpenVINO's own layout (integers, zero points, float16 scales, widened by Convert-Subtract-Multiply),
which the CPU plugin runs without unpacking; the rounding is plain min-max, as nncf does without data.
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


@dataclass(frozen=True)
class Int8:
    """Unsigned 8 bits, one scale and zero point per output channel."""

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        return _widened(*_affine(weight.float32(), levels=255), ov.Type.u8)


@dataclass(frozen=True)
class Int4:
    """Unsigned 4 bits per group of `group_size` inputs; embedding and head stay at 8, they cost the most quality."""

    group_size: int

    def matrix(self, weight: Weight, embedding: bool = False) -> Node:
        rows, columns = weight.data.shape
        if embedding or columns % self.group_size:
            return Int8().matrix(weight)
        grouped = weight.float32().reshape(rows, columns // self.group_size, self.group_size)
        wide = _widened(*_affine(grouped, levels=15), ov.Type.u4)
        return ops.reshape(wide, ops.constant(np.array([rows, columns], dtype=np.int64)), False)


def _affine(values: NDArray[np.float32], levels: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Integers, zero points and scales along the last axis, so that (q - zero) * scale is near the value."""
    low = np.minimum(values.min(axis=-1, keepdims=True), 0)
    high = np.maximum(values.max(axis=-1, keepdims=True), 0)
    # Rounded to float16 first, as it is stored, so that the integers are the best ones for the scale in use.
    scale = ((high - low) / levels).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    zero = np.clip(np.round(-low / scale), 0, levels)
    quantised = np.clip(np.round(values / scale) + zero, 0, levels)
    return quantised.astype(np.uint8), zero.astype(np.uint8), scale.astype(np.float16)


def _widened(quantised: NDArray[Any], zero: NDArray[Any], scale: NDArray[Any], kind: ov.Type) -> Node:
    integers = ops.convert(_integers(quantised, kind), "f16")
    shifted = ops.subtract(integers, ops.convert(_integers(zero, kind), "f16"))
    return ops.convert(ops.multiply(shifted, op.Constant(scale)), "f32")


def _integers(values: NDArray[Any], kind: ov.Type) -> op.Constant:
    tensor = ov.Tensor(kind, ov.Shape(values.shape))
    tensor.data.reshape(-1)[:] = values.reshape(-1) if kind == ov.Type.u8 else _packed(values.reshape(-1))
    return op.Constant(tensor, shared_memory=True)


def _packed(flat: NDArray[Any]) -> NDArray[Any]:
    """4-bit values two to a byte, the first in the lower half."""
    even = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
    return even[0::2] | (even[1::2] << 4)
