"""Decode the number formats of exported checkpoints without ModelOpt.

With ModelOpt's own decoder, a fault of ModelOpt would not be found.
"""

import torch
from torch import Tensor

#: Largest value of an E4M3 number.
E4M3_MAX = 448.0


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack (…, out/2, in) bytes to (…, out, in) float32 in [-8, 7].

    The lower half of a byte is a value of the even row.
    """
    data = packed.view(torch.uint8)
    low, high = (data & 0x0F).to(torch.int8), (data >> 4).to(torch.int8)
    rows = torch.stack([low, high], dim=-2)
    rows = torch.where(rows > 7, rows - 16, rows)
    return rows.flatten(-3, -2).float()


def dequantise(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a stored weight as float32 (…, out, in).

    `scale` has one number, a number per output row, or a number per row and group of inputs. The
    second factor of W4A8 is not part of the weight: it only rescales the FP8 product.
    """
    if scale is None or (weight.is_floating_point() and weight.element_size() > 1):
        return weight.float()
    if weight.dtype == torch.float8_e4m3fn:
        return weight.float() * _per_row(scale.float(), weight.dim())
    if _is_packed(weight, scale):
        steps, values = scale.float(), unpack_int4(weight)
        return values * steps.repeat_interleave(values.shape[-1] // steps.shape[-1], dim=-1)
    return weight.float() * _per_row(scale.float(), weight.dim())


def _is_packed(weight: Tensor, scale: Tensor) -> bool:
    return bool(scale.dim() == weight.dim() and scale.shape[-2] == 2 * weight.shape[-2])


def _per_row(scale: Tensor, dims: int) -> Tensor:
    """Return the scale in a shape that multiplies the rows of a weight with `dims` dimensions.

    A scale of one number becomes a scalar. To other scales, dimensions of length 1 are added.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape(*scale.shape, *[1] * (dims - scale.dim()))


def round_to_e4m3(value: Tensor, scale: Tensor | float) -> Tensor:
    """Round `value` to the nearest products of `scale` and an E4M3 number.

    The input of an FP8 tensor core is rounded in this way.
    """
    return (value / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(value.dtype) * scale


def round_to_int8(value: Tensor, scale: Tensor | float) -> Tensor:
    """Round `value` to the nearest products of `scale` and an integer from -128 to 127."""
    return (value / scale).round().clamp(-128, 127) * scale


def round_per_channel(weight: Tensor, bits: int) -> Tensor:
    """Round a 16-bit weight (…, out, in) like trtllm-build with --use_weight_only.

    Each output has the step size amax / 2**(bits-1) (TensorRT-LLM
    `cutlass_kernels/cutlass_preprocessors.cpp`, symmetric_quantize).
    """
    limit = 1 << (bits - 1)
    step = (weight.abs().amax(dim=-1, keepdim=True) / limit).clamp(min=1e-30)
    return (weight / step).round().clamp(-limit, limit - 1) * step
