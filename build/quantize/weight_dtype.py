"""What weights that are not quantised are stored in."""

from __future__ import annotations

from llmops.build.model.architecture import Architecture
from llmops.errors import InputError

_STORED = ("float16", "bfloat16")


def stored_dtype(arch: Architecture, wanted: object = None) -> str:
    """float16 or bfloat16: what weights that are not quantised are stored in; float32 sources become float16.
    `wanted` is what `--set dtype` says. Raises InputError."""
    if wanted is not None and wanted not in _STORED:
        raise InputError(f"--set dtype={wanted}: weights are stored in {' or '.join(_STORED)}.")
    return str(wanted) if wanted else arch.dtype if arch.dtype in _STORED else "float16"
