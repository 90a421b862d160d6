"""Rotary position embedding: the scalings that can be built, and inverse frequencies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmops.errors import CheckpointError
from llmops.input_files import MALFORMED
from llmops.untrusted_text import escape_unsafe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


ROPE_KINDS = ("default", "linear", "llama3")


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_theta`, `rope_type` and the factors of the scaling.

    The fields may have the spelling of any version of transformers.

    Raises:
        CheckpointError: The fields are not numbers in an object.
    """
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        kind = nested.get("rope_type") or nested.get("type") or "default"
        theta = config.get("rope_theta") or nested.get("rope_theta") or 10000.0
        return {**nested, "rope_type": kind, "rope_theta": float(theta)}
    except MALFORMED:
        raise _unusable(config) from None


def rope_kind(config: dict[str, Any]) -> str:
    """Return the kind of RoPE scaling, such as default, linear or llama3."""
    return str(rope_parameters(config)["rope_type"])


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Return the inverse frequencies of the rotary embedding, shape (head_dim / 2,).

    Raises:
        CheckpointError: The scaling is not in `ROPE_KINDS`, or the frequencies are not positive
            numbers.
    """
    import numpy as np

    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"RoPE scaling {kind!r:.60} is not supported by --target openvino, which has {', '.join(ROPE_KINDS)}; use "
            "--target pytorch."
        )
    exponents = np.arange(0, head_dim, 2, dtype=np.int64).astype(np.float32) / np.float32(head_dim)
    with np.errstate(all="ignore"):
        try:
            frequencies = (1.0 / (np.float32(parameters["rope_theta"]) ** exponents)).astype(np.float32)
            if kind == "linear":
                frequencies = (frequencies / np.float32(parameters["factor"])).astype(np.float32)
            elif kind == "llama3":
                frequencies = _llama3(frequencies, parameters)
        except MALFORMED:
            raise _unusable(config) from None
        if not (np.isfinite(frequencies) & (frequencies > 0)).all():
            raise _unusable(config)
    return frequencies


def _unusable(config: dict[str, Any]) -> CheckpointError:
    fields = {name: config[name] for name in ("rope_theta", "rope_parameters", "rope_scaling") if name in config}
    return CheckpointError(
        f"config.json has {escape_unsafe(str(fields), 200)}, which gives no rotary frequencies; download config.json "
        "again."
    )


def _llama3(frequencies: NDArray[np.float32], parameters: dict[str, Any]) -> NDArray[np.float32]:
    """Scale rotary frequencies like Llama 3.1.

    Long wavelengths are stretched by `factor`, short wavelengths are kept, and wavelengths between
    are interpolated.
    """
    import numpy as np

    factor, context = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    blend = (context / wavelength - low) / (high - low)
    scaled = np.where(wavelength > context / low, frequencies / factor, frequencies)
    between = (wavelength <= context / low) & (wavelength >= context / high)
    return np.where(between, (1 - blend) * frequencies / factor + blend * frequencies, scaled).astype(np.float32)
