"""Phi-3 keeps gate and up in one matrix. ModelOpt 0.47 swaps the halves and cuts the result into tp pieces in a row, so
with tp 2 one GPU gets all of `up` and the other all of `gate`; each needs its share of both."""

from __future__ import annotations

from typing import Any


def interleave_gate_up(model: Any, tp: int) -> None:
    """Reorder rows (and their scales) so that what ModelOpt writes is [up_t; gate_t] on rank t. For export only: the
    model computes nonsense afterwards."""
    import torch

    if tp == 1:
        return
    for name, module in model.named_modules():
        if name.endswith(".gate_up_proj"):
            with torch.no_grad():
                _reorder(module, tp)


def _reorder(module: Any, tp: int) -> None:
    import torch

    rows = module.weight.shape[0]
    gate, up = torch.arange(rows).chunk(2)
    shares = [part for pair in zip(up.chunk(tp), gate.chunk(tp), strict=True) for part in pair]
    # ModelOpt will swap the halves once more
    second, first = torch.cat(shares).chunk(2)
    order = torch.cat([first, second]).to(module.weight.device)
    module.weight.data = module.weight.data[order]
    quantizers = getattr(module, "weight_quantizer", None)
    for quantizer in quantizers if isinstance(quantizers, torch.nn.Sequential) else [quantizers]:
        amax = getattr(quantizer, "_amax", None)
        if quantizer is not None and amax is not None and amax.numel() > 1:
            quantizer._amax = amax.reshape(rows, -1)[order].reshape(amax.shape)
