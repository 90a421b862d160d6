"""Number formats of exported checkpoints, decoded without ModelOpt.

Otherwise ModelOpt's code would check itself.
"""

import torch
from torch import Tensor

#: Largest E4M3 value.
E4M3_MAX = 448.0


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack (…, out/2, in) bytes to (…, out, in) float32 in [-8, 7].

    The low half of a byte is the even row.
    """
    data = packed.view(torch.uint8)
    low, high = (data & 0x0F).to(torch.int8), (data >> 4).to(torch.int8)
    rows = torch.stack([low, high], dim=-2)
    rows = torch.where(rows > 7, rows - 16, rows)
    return rows.flatten(-3, -2).float()


def dequantise(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return the float32 (…, out, in) of a stored weight.

    `scale` is one number, one per output row, or one per row and group of inputs. (The second
    factor of W4A8 only says how the FP8 product is rescaled: these scales are whole.)
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
    """Reshape a scale to multiply rows. A single number, or one per expert, stays as it is."""
    if scale.numel() == 1:
        return scale.reshape(())
    return scale.reshape(*scale.shape, *[1] * (dims - scale.dim()))


def round_to_e4m3(value: Tensor, scale: Tensor | float) -> Tensor:
    """Round to what an FP8 tensor core sees."""
    return (value / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(value.dtype) * scale


def round_to_int8(value: Tensor, scale: Tensor | float) -> Tensor:
    """Round to 8-bit integers times `scale`."""
    return (value / scale).round().clamp(-128, 127) * scale


def round_per_channel(weight: Tensor, bits: int) -> Tensor:
    """Round a 16-bit weight (…, out, in) as trtllm-build does with --use_weight_only.

    One step of amax / 2**(bits-1) per output (TensorRT-LLM
    `cutlass_kernels/cutlass_preprocessors.cpp`, symmetric_quantize).
    """
    limit = 1 << (bits - 1)
    step = (weight.abs().amax(dim=-1, keepdim=True) / limit).clamp(min=1e-30)
    return (weight / step).round().clamp(-limit, limit - 1) * step
