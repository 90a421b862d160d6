"""Does every exported weight do to a few fixed vectors what the source's does?

A fault in one layer of many may hardly move the answers; here it stands out, whatever the size of the model, and
without a forward pass: rounding to E4M3 moves a weight by 3%, a wrong scale or a swapped shard by 50% and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmops.build.quantize.embedding_tables import EmbeddingTable

_VECTORS = 8
_ROWS = 8192
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
# whose inputs a norm scales. Layers that have a norm in front of the MLP have the other one behind the attention
_FED = {"input_layernorm": _ATTENTION, "pre_feedforward_layernorm": _MLP}
_FED_WITHOUT_IT = {"input_layernorm": _ATTENTION, "post_attention_layernorm": _MLP}


def sketch(parameters: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Per parameter, float32 on the CPU: (out, 8) of a matrix times fixed random vectors; norms and biases whole.

    A matrix behind a norm is taken together with it, and that norm not by itself: AWQ moves scales from the one into
    the other, and only what they do together has to stay. So `parameters` are those of whole layers.
    """
    norms = _norms_before(parameters)
    # Gemma's norms scale by 1 + weight
    offset = 1.0 if str(getattr(config, "model_type", "")).startswith("gemma") else 0.0
    return {
        name: _sketch(value, parameters[norms[name]] + offset if name in norms else None)
        for name, value in parameters.items()
        if name not in norms.values()
    }


def sketch_table(table: EmbeddingTable) -> Tensor:
    """(rows, 8): the embedding or the output matrix times the same vectors as `sketch` takes."""
    return torch.cat([block @ _vectors(table.shape[1]) for block in table.blocks()])


def _norms_before(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Matrix → the norm that scales its inputs."""
    found = {}
    for norm in parameters:
        layer, _, kind = norm.removesuffix(".weight").rpartition(".")
        fed = _FED if f"{layer}.pre_feedforward_layernorm.weight" in parameters else _FED_WITHOUT_IT
        found.update({f"{layer}.{module}.weight": norm for module in fed.get(kind, ())})
    return {matrix: norm for matrix, norm in found.items() if matrix in parameters}


def _sketch(parameter: Tensor, norm: Tensor | None) -> Tensor:
    if parameter.dim() != 2:
        return parameter.detach().float().cpu().clone()
    vectors = _vectors(parameter.shape[1]).to(parameter.device)
    if norm is not None:
        vectors = norm.detach().float().to(parameter.device)[:, None] * vectors
    # in blocks: a large vocabulary in float32 would take gigabytes
    return torch.cat([(rows.detach().float() @ vectors).cpu() for rows in parameter.split(_ROWS)])


def _vectors(size: int) -> Tensor:
    """(size, 8), the same for every matrix with that many inputs."""
    return torch.randn(size, _VECTORS, generator=torch.Generator().manual_seed(size))


def largest_difference(candidate: dict[str, Tensor], source: dict[str, Tensor]) -> tuple[float, str]:
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
