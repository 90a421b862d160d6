"""Rotary position embedding: the inverse frequencies, scaled as the checkpoint's config asks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from llmops.build.targets.openvino.rope_config import ROPE_KINDS, rope_parameters
from llmops.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Shape (head_dim / 2,). Raises CheckpointError for a scaling that is not in `ROPE_KINDS`."""
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    exponents = np.arange(0, head_dim, 2, dtype=np.int64).astype(np.float32) / np.float32(head_dim)
    plain = (1.0 / (np.float32(parameters["rope_theta"]) ** exponents)).astype(np.float32)
    if kind == "default":
        return plain
    if kind == "linear":
        return (plain / np.float32(parameters["factor"])).astype(np.float32)
    if kind == "llama3":
        return _llama3(plain, parameters)
    raise CheckpointError(
        f"RoPE scaling {kind!r} is not supported by --target openvino, which has {', '.join(ROPE_KINDS)}; use --target "
        "pytorch."
    )


def _llama3(plain: NDArray[np.float32], parameters: dict[str, Any]) -> NDArray[np.float32]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, context = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    blend = (context / wavelength - low) / (high - low)
    scaled = np.where(wavelength > context / low, plain / factor, plain)
    between = (wavelength <= context / low) & (wavelength >= context / high)
    return np.where(between, (1 - blend) * plain / factor + blend * plain, scaled).astype(np.float32)
