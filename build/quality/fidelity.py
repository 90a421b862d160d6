"""Does every exported weight do to a few fixed vectors what the source's does?

A fault in one layer of many may hardly move the answers; here it stands out, whatever the size of the model, and
without a forward pass: rounding to E4M3 moves a weight by 3%, a wrong scale or a swapped shard by 50% and more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_VECTORS = 8
_ROWS = 8192


def sketch(model: Any) -> dict[str, Tensor]:
    """Per parameter, float32 on the CPU: (out, 8) of a matrix times fixed random vectors; norms and biases whole."""
    from llmops.build.quantize.loading import parameter_names

    parameters = dict(model.named_parameters())
    return {name: _sketch(parameters[name]) for name in parameter_names(model)}


def _sketch(parameter: Tensor) -> Tensor:
    if parameter.dim() != 2:
        return parameter.detach().float().cpu()
    vectors = _vectors(parameter.shape[1]).to(parameter.device)
    # in blocks: a large vocabulary in float32 would take gigabytes
    return torch.cat([(rows.detach().float() @ vectors).cpu() for rows in parameter.split(_ROWS)])


def _vectors(size: int) -> Tensor:
    """(size, 8), the same for every matrix with that many inputs."""
    return torch.randn(size, _VECTORS, generator=torch.Generator().manual_seed(size))


def furthest(candidate: dict[str, Tensor], source: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of a parameter, and its name. An output matrix that the source has not is compared
    with the embedding."""
    errors = {name: _error(value, _counterpart(name, source)) for name, value in candidate.items()}
    name = max(errors, key=lambda name: errors[name])
    return errors[name], name


def _counterpart(name: str, source: dict[str, Tensor]) -> Tensor:
    return source[name] if name in source else source["model.embed_tokens.weight"]


def _error(value: Tensor, expected: Tensor) -> float:
    """Rows past the source's are padding of the vocabulary."""
    value = value[: len(expected)]
    if not torch.isfinite(value).all():
        return float("inf")
    return float((value - expected).norm() / expected.norm().clamp(min=1e-12))
