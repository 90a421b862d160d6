"""Tensors as TensorRT-LLM takes them: of torch, which comes with it."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_tensor(values: np.ndarray, size: int = 0) -> Any:
    """Return the values as a float32 tensor, with zeros up to `size`."""
    import torch

    padded = np.zeros(max(size, values.size), np.float32)
    padded[: values.size] = values
    return torch.from_numpy(padded)
