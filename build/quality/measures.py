"""Compare an export with its source: log-probabilities, input ranges and weights."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmops.build.quantize.embedding_tables import EmbeddingTable
from llmops.build.quantize.exported_weights import InputRounding


@dataclass
class Comparison:
    """A comparison of the log-probabilities of source and export, summed over tokens.

    `add` is called once per text. With p the source and q the export, `perplexity_ratio` is
    exp(mean NLL of q - mean NLL of p), and KL is KL(p || q) in nats per token.
    """

    tokens: int = 0
    nll_reference: float = 0.0
    nll_candidate: float = 0.0
    agreeing: int = 0
    kl_sum: float = 0.0
    kl_worst: float = 0.0

    def add(self, reference: Tensor, candidate: Tensor, targets: Tensor) -> None:
        """Add the tokens of one text.

        Args:
            reference: Log-probabilities of the source, (tokens, vocabulary).
            candidate: Log-probabilities of the export, (tokens, vocabulary).
            targets: The tokens that follow in the text, (tokens,).
        """
        p, q = reference.float(), candidate.float()
        if not torch.isfinite(q).all():
            self._add_broken(len(targets))
            return
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
        self.tokens += len(targets)
        self.nll_reference -= float(p.gather(-1, targets[:, None]).sum())
        self.nll_candidate -= float(q.gather(-1, targets[:, None]).sum())
        self.agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.kl_sum += float(kl.sum())
        self.kl_worst = max(self.kl_worst, float(kl.max()))

    def _add_broken(self, tokens: int) -> None:
        """Add tokens with NaN or infinity, as the worst values that JSON can hold."""
        self.tokens += tokens
        self.nll_candidate += 100.0 * tokens
        self.kl_sum += 100.0 * tokens
        self.kl_worst = 100.0

    @property
    def perplexity(self) -> float:
        """Return the perplexity of the source."""
        return float(np.exp(self.nll_reference / self.tokens))

    @property
    def perplexity_ratio(self) -> float:
        """Return the perplexity of the export divided by the perplexity of the source, at most e^100."""
        return float(np.exp(min((self.nll_candidate - self.nll_reference) / self.tokens, 100.0)))

    @property
    def top1_agreement(self) -> float:
        """Return the share of tokens for which both models prefer the same token."""
        return self.agreeing / self.tokens

    @property
    def mean_kl(self) -> float:
        """Return the mean KL divergence in nats per token."""
        return self.kl_sum / self.tokens


@contextmanager
def input_ranges(model: Any) -> Iterator[dict[str, Tensor]]:
    """Collect the largest magnitude of each input of every linear layer, inside the block.

    The values are float32 tensors (in,), by the name of the layer.
    """
    found: dict[str, Tensor] = {}

    def watch(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        value = inputs[0].detach().flatten(0, -2)
        if len(value):
            largest = value.abs().amax(dim=0).float().cpu()
            found[name] = torch.maximum(found[name], largest) if name in found else largest

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_pre_hook(partial(watch, name)))
        yield found


def range_coverage(inputs: dict[str, InputRounding], ranges: dict[str, Tensor]) -> dict[str, float]:
    """Return the calibrated range of each layer, divided by the range in the evaluation texts.

    Inputs of a layer with a value below 1 are clipped.
    """
    ratios = {}
    for name, rounding in inputs.items():
        largest = rounding.largest()
        if largest is not None and name in ranges:
            reached = float((ranges[name] / largest).max())
            ratios[name] = 1 / reached if reached > 0 else 1.0
    return ratios


#: Number of random vectors per sketch: enough to find a wrong matrix, few enough to store.
_VECTORS = 8
#: Maximum number of rows multiplied at once: a large vocabulary in float32 takes gigabytes.
_ROWS = 8192
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
#: The matrices whose inputs each norm scales, in layers that have a norm in front of the MLP. In
#: such layers, `post_attention_layernorm` follows the attention.
_FED = {"input_layernorm": _ATTENTION, "pre_feedforward_layernorm": _MLP}
_FED_WITHOUT_MLP_NORM = {"input_layernorm": _ATTENTION, "post_attention_layernorm": _MLP}


def sketch(parameters: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return random projections of weights, by which an export is compared with its source.

    The comparison finds a fault in one layer even if answers hardly change.

    Rounding to E4M3 moves a sketch by 3 %, and a wrong scale or a swapped shard by 50 % or more. A
    matrix behind a norm is multiplied by the norm, and the norm has no sketch, because AWQ moves
    scales between the two and keeps only their product. `parameters` must therefore hold whole
    layers.

    Returns:
        A float32 tensor on the CPU for each parameter: a matrix times fixed random vectors, (out,
        8), or a whole norm or bias.
    """
    norms = _norms_before(parameters)
    # Gemma's norms multiply by 1 + weight.
    offset = 1.0 if str(getattr(config, "model_type", "")).startswith("gemma") else 0.0
    return {
        name: _sketch(value, parameters[norms[name]] + offset if name in norms else None)
        for name, value in parameters.items()
        if name not in norms.values()
    }


def sketch_table(table: EmbeddingTable) -> Tensor:
    """Return the embedding or output matrix times the random vectors of `sketch`, (rows, 8)."""
    return torch.cat([block @ _vectors(table.shape[1]) for block in table.blocks()])


def _norms_before(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the norm that scales the inputs of each matrix, by the name of the matrix."""
    found = {}
    for norm in parameters:
        layer, _, kind = norm.removesuffix(".weight").rpartition(".")
        fed = _FED if f"{layer}.pre_feedforward_layernorm.weight" in parameters else _FED_WITHOUT_MLP_NORM
        found.update({f"{layer}.{module}.weight": norm for module in fed.get(kind, ())})
    return {matrix: norm for matrix, norm in found.items() if matrix in parameters}


def _sketch(parameter: Tensor, norm: Tensor | None) -> Tensor:
    if parameter.dim() != 2:
        return parameter.detach().float().cpu().clone()
    vectors = _vectors(parameter.shape[1]).to(parameter.device)
    if norm is not None:
        vectors = norm.detach().float().to(parameter.device)[:, None] * vectors
    return torch.cat([(rows.detach().float() @ vectors).cpu() for rows in parameter.split(_ROWS)])


def _vectors(size: int) -> Tensor:
    """Return random vectors (size, 8), the same for every matrix with `size` inputs."""
    return torch.randn(size, _VECTORS, generator=torch.Generator().manual_seed(size))


def largest_difference(candidate: dict[str, Tensor], source: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a parameter, and the name of the parameter.

    If the source has no output matrix, the export's output matrix is compared with the embedding.
    """
    errors = {name: _error(value, _counterpart(name, source)) for name, value in candidate.items()}
    name = max(errors, key=lambda name: errors[name])
    return errors[name], name


def _counterpart(name: str, source: dict[str, Tensor]) -> Tensor:
    return source[name] if name in source else source["model.embed_tokens.weight"]


def _error(value: Tensor, expected: Tensor) -> float:
    """Return the error of a sketch or vector of the export, relative to the norm of `expected`.

    The result is infinite if `value` has NaN or infinity. Rows of `value` that `expected` lacks are
    padding of the vocabulary, and are ignored.
    """
    value = value[: len(expected)]
    if not torch.isfinite(value).all():
        return float("inf")
    return float((value - expected).norm() / expected.norm().clamp(min=1e-12))
