"""A reader of messages with several requests.

A message has the tensor `submissions`, STRING [1, k], and the token ids of all k requests in
`input_ids`. A separate message per request would cost Triton and the gateway more than all of their
other work for the request (docs/contract.md). A JSON value can have any type, so this module checks
values as Triton checks the datatypes of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import llmops_contract as contract
import numpy as np

from ..request import RequestRejectedError
from ..tensor_parser import Tensors


class _Datatype(NamedTuple):
    """A tensor datatype, with the Python types and the range of its values in JSON."""

    dtype: np.dtype
    scalars: tuple[type, ...]
    low: float
    high: float


def _integer(name: str) -> _Datatype:
    limits = np.iinfo(name)
    return _Datatype(np.dtype(name), (int,), int(limits.min), int(limits.max))


def _float(name: str) -> _Datatype:
    limits = np.finfo(name)
    return _Datatype(np.dtype(name), (int, float), float(limits.min), float(limits.max))


_DATATYPES = {
    "TYPE_BOOL": _Datatype(np.dtype(bool), (bool,), False, True),
    **{f"TYPE_{name.upper()}": _integer(name) for name in ("uint8", "int32", "int64", "uint64")},
    "TYPE_FP16": _float("float16"),
    "TYPE_FP32": _float("float32"),
}
_SLOTS = range(2**31)
_INPUT_IDS = contract.INPUT_IDS.name


class SubmissionReader:
    """A parser of the submissions to one model."""

    def __init__(self, inputs: list[dict[str, Any]]) -> None:
        """Create a parser. `inputs` are the ModelConfig's inputs (`name` and `data_type`)."""
        self._types = {tensor["name"]: tensor["data_type"] for tensor in inputs}

    def read(self, tensors: Tensors) -> Iterator[tuple[int, Tensors | RequestRejectedError]]:
        """Yield each request's slot and tensors, or its slot and the error that rejects it.

        The value `input_lengths` of a request is the number of its token ids in `input_ids`.

        Raises:
            RequestRejectedError: The whole message is unreadable.
        """
        ids, start = tensors.get(_INPUT_IDS, np.zeros(0, np.int32)).reshape(-1), 0
        for raw in tensors[contract.SUBMISSIONS.name].reshape(-1):
            values = _json_object(raw)
            slot, length = values.pop(contract.SLOT.name, None), values.get(contract.INPUT_LENGTHS.name)
            if type(slot) is not int or slot not in _SLOTS:
                raise RequestRejectedError(
                    f"{contract.SUBMISSIONS}: each submission needs {contract.SLOT}, a number from 0 to 2147483647"
                )
            if type(length) is not int or not 0 <= length <= ids.size - start:
                raise RequestRejectedError(
                    f"{contract.SUBMISSIONS}: each submission needs {contract.INPUT_LENGTHS}, and that "
                    f"number of tokens in {_INPUT_IDS}"
                )
            prompt, start = ids[start : start + length], start + length
            yield slot, self._tensors(values, prompt)
        if start != ids.size:
            raise RequestRejectedError(f"{_INPUT_IDS}: {ids.size - start} tokens belong to no submission")

    def _tensors(self, values: Mapping[str, Any], ids: np.ndarray) -> Tensors | RequestRejectedError:
        try:
            return {**{name: self._array(name, value) for name, value in values.items()}, _INPUT_IDS: ids}
        except RequestRejectedError as rejection:
            return rejection

    def _array(self, name: str, value: Any) -> np.ndarray:
        data_type = self._types.get(name)
        if data_type is None:
            raise RequestRejectedError(f"{name}: not an input of this model")
        return _text(name, value) if data_type == "TYPE_STRING" else _numbers(name, value, _DATATYPES[data_type])


def _text(name: str, value: Any) -> np.ndarray:
    try:
        return np.array([value.encode()], object)
    except (AttributeError, UnicodeEncodeError):
        raise RequestRejectedError(f"{name}: must be text in UTF-8") from None


def _numbers(name: str, value: Any, kind: _Datatype) -> np.ndarray:
    leaves = _leaves(value) if isinstance(value, list) else (value,)
    if not all(type(leaf) in kind.scalars and kind.low <= leaf <= kind.high for leaf in leaves):
        raise RequestRejectedError(f"{name}: must be {kind.dtype.name}")
    try:
        return np.array(value, kind.dtype)
    except ValueError:
        raise RequestRejectedError(f"{name}: its rows must be equally long") from None


def _leaves(value: list[Any]) -> Iterator[Any]:
    """Yield the numbers of a list. No tensor has more than two dimensions besides the batch."""
    for row in value:
        yield from row if isinstance(row, list) else (row,)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRejectedError(f"{contract.SUBMISSIONS}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestRejectedError(f"{contract.SUBMISSIONS}: each submission must be a JSON object")
    return values
