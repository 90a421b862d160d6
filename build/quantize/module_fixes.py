"""Correct fused modules that ModelOpt 0.47 exports wrongly.

transformers 5 keeps a layer's experts in two 3-D tensors, while ModelOpt exports separate Linears:
`split_experts` makes Mixtral and Qwen3-MoE exportable. Phi-3 keeps gate and up in one matrix:
ModelOpt swaps the halves and cuts the result into tp consecutive pieces. With tp 2, one GPU would
get all of `up` and the other all of `gate`, although each GPU needs a part of both.
`interleave_gate_up` reorders the rows to correct this.
"""

from typing import Any

import torch
from torch import nn

#: Fused module -> the names of gate, up and down that ModelOpt's exporter looks for.
NAMES = {
    "MixtralExperts": ("w1", "w3", "w2"),
    "Qwen3MoeExperts": ("gate_proj", "up_proj", "down_proj"),
    "DeepseekV3NaiveMoe": ("gate_proj", "up_proj", "down_proj"),
}


class ExpertMlp(nn.Module):
    """A gated MLP of separate Linears: (intermediate, hidden) twice, and (hidden, intermediate)."""

    def __init__(self, names: tuple[str, str, str], gate_up: torch.Tensor, down: torch.Tensor, act: Any) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2, dim=0)
        self.names, self.act_fn = names, act
        for name, weight in zip(names, (gate, up, down), strict=True):
            setattr(self, name, _linear(weight))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        output: torch.Tensor = down(self.act_fn(gate(hidden)) * up(hidden))
        return output


class ExpertList(nn.ModuleList):
    """A replacement of the fused experts.

    The inputs are hidden states (tokens, hidden), and indices and weights of experts (tokens,
    top_k).
    """

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            token, position = torch.where(indices == number)
            if len(token):
                part = expert(hidden[token]) * weights[token, position, None]
                output.index_add_(0, token, part.to(output.dtype))
        return output


def split_experts(model: nn.Module) -> int:
    """Replace every fused expert module and return their number.

    The fused tensors are freed layer by layer.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in NAMES]
    for name, fused in found:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _split(fused))
    return len(found)


def _split(fused: Any) -> ExpertList:
    names = NAMES[type(fused).__name__]
    return ExpertList(
        ExpertMlp(names, fused.gate_up_proj.data[i], fused.down_proj.data[i], fused.act_fn)
        for i in range(len(fused.down_proj))
    )


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear


def interleave_gate_up(model: Any, tp: int) -> None:
    """Reorder rows and their scales so that ModelOpt writes [up_t; gate_t] on rank t.

    The model computes wrong results afterwards and can only be exported.
    """
    if tp == 1:
        return
    for name, module in model.named_modules():
        if name.endswith(".gate_up_proj"):
            with torch.no_grad():
                _reorder(module, tp)


def _reorder(module: Any, tp: int) -> None:
    rows = module.weight.shape[0]
    gate, up = torch.arange(rows).chunk(2)
    shares = [part for pair in zip(up.chunk(tp), gate.chunk(tp), strict=True) for part in pair]
    # ModelOpt swaps the halves once more.
    second, first = torch.cat(shares).chunk(2)
    order = torch.cat([first, second]).to(module.weight.device)
    module.weight.data = module.weight.data[order]
    quantizers = getattr(module, "weight_quantizer", None)
    for quantizer in quantizers if isinstance(quantizers, torch.nn.Sequential) else [quantizers]:
        amax = getattr(quantizer, "_amax", None)
        if quantizer is not None and amax is not None and amax.numel() > 1:
            quantizer._amax = amax.reshape(rows, -1)[order].reshape(amax.shape)
