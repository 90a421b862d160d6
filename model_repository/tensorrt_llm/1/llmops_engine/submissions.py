"""Several requests of a gateway in one message: `submissions` STRING [1, k] and the token ids of all in `input_ids`.

A request per message costs Triton and the gateway more than all else that is done for it (docs/contract.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from .parse import Tensors
from .request import Refused


def read_submissions(tensors: Tensors) -> Iterator[tuple[int, Tensors]]:
    """Slot and tensors of each. `input_lengths` says how many of the ids are its own. Raises Refused."""
    ids, start = tensors.get("input_ids", np.zeros(0, np.int32)).reshape(-1), 0
    for raw in tensors["submissions"].reshape(-1):
        values = _object(raw)
        slot, length = values.pop("slot", None), values.get("input_lengths")
        if not isinstance(slot, int) or not isinstance(length, int) or not 0 <= length <= ids.size - start:
            raise Refused("submissions: each needs its slot, and as many of input_ids as its input_lengths says")
        one = {name: _array(name, value) for name, value in values.items()}
        one["input_ids"] = ids[start : start + length]
        start += length
        yield slot, one


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, str):
        # numpy's own texts end at their last character that is not NUL
        return np.asarray(value, object)
    try:
        return np.asarray(value)
    except ValueError:
        raise Refused(f"{name}: its rows must be equally long") from None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise Refused(f"submissions: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise Refused("submissions: each must be a JSON object")
    return values
