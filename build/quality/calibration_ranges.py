"""Do the ranges that calibration found cover what the layers really get?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmops.build.quantize.exported_weights import InputRounding


@contextmanager
def input_ranges(model: Any) -> Iterator[dict[str, Tensor]]:
    """While it is open, collects the largest magnitude of each input of every linear layer, float32 (in,)."""
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            value = inputs[0].detach().flatten(0, -2)
            if len(value):
                largest = value.abs().amax(dim=0).float().cpu()
                found[name] = torch.maximum(found[name], largest) if name in found else largest

        return hook

    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def range_coverage(inputs: dict[str, InputRounding], ranges: dict[str, Tensor]) -> dict[str, float]:
    """Per layer with a calibrated range: that range over what the evaluation texts reach. Below 1 it clips."""
    ratios = {}
    for name, rounding in inputs.items():
        largest = rounding.largest()
        if largest is not None and name in ranges:
            reached = float((ranges[name] / largest).max())
            ratios[name] = 1 / reached if reached > 0 else 1.0
    return ratios
