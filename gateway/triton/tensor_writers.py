"""Two encodings of a request's tensors.

The tensors are sent in a message of their own, or as a JSON object in a submission.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from llmops.contract import BOOL, FP32, INT32, INT64, UINT64, Tensor

_PACK = {
    datatype: struct.Struct(form).pack
    for datatype, form in {INT32: "<i", FP32: "<f", INT64: "<q", UINT64: "<Q", BOOL: "<?"}.items()
}


class TensorWriter(ABC):
    """A writer of the contract's tensors.

    A tensor that is sent as a tensor has a leading batch dimension of 1.

    Values must fit their datatypes; the engine checks them.
    """

    @abstractmethod
    def scalar(self, tensor: Tensor, value: float) -> None: ...

    @abstractmethod
    def text(self, tensor: Tensor, value: str) -> None: ...

    @abstractmethod
    def floats(self, tensor: Tensor, values: Sequence[float]) -> None:
        """Write FP32 [1, n]."""

    @abstractmethod
    def words(self, tensor: Tensor, words: Sequence[Sequence[int]]) -> None:
        """Write a list of words as INT32 [1, 2, n].

        Row 0 has the flattened ids, row 1 the cumulative end offset of each word, padded with -1.
        """


class MessageTensorWriter(TensorWriter):
    """A writer that appends tensors to a message, with their contents as raw bytes."""

    def __init__(self, message: service_pb2.ModelInferRequest) -> None:
        self._add_input, self._add_content = message.inputs.add, message.raw_input_contents.append

    def scalar(self, tensor: Tensor, value: float) -> None:
        self.add(tensor, (1, 1), _PACK[tensor.datatype](value))

    def text(self, tensor: Tensor, value: str) -> None:
        self.texts(tensor, [value.encode()])

    def texts(self, tensor: Tensor, values: Sequence[bytes]) -> None:
        """Write BYTES [1, n]."""
        self.add(tensor, (1, len(values)), b"".join(struct.pack("<I", len(one)) + one for one in values))

    def ids(self, tensor: Tensor, values: Sequence[int]) -> None:
        """Write INT32 [1, n]."""
        self.add(tensor, (1, len(values)), array("i", values).tobytes())

    def floats(self, tensor: Tensor, values: Sequence[float]) -> None:
        self.add(tensor, (1, len(values)), array("f", values).tobytes())

    def words(self, tensor: Tensor, words: Sequence[Sequence[int]]) -> None:
        flat, ends = _pack_words(words)
        self.add(tensor, (1, 2, len(flat)), array("i", flat + ends).tobytes())

    def add(self, tensor: Tensor, shape: Sequence[int], data: bytes) -> None:
        """Write any tensor; `data` is its content, little-endian."""
        self._add_input(name=tensor.name, datatype=tensor.datatype, shape=shape)
        self._add_content(data)


class JsonTensorWriter(TensorWriter):
    """A writer that collects tensors in a JSON object.

    Scalars are numbers, all others arrays without the batch dimension.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def scalar(self, tensor: Tensor, value: float) -> None:
        self._values[tensor.name] = value

    def text(self, tensor: Tensor, value: str) -> None:
        self._values[tensor.name] = value

    def floats(self, tensor: Tensor, values: Sequence[float]) -> None:
        self._values[tensor.name] = list(values)

    def words(self, tensor: Tensor, words: Sequence[Sequence[int]]) -> None:
        self._values[tensor.name] = _pack_words(words)

    def encoded(self) -> bytes:
        return json.dumps(self._values).encode()


def _pack_words(words: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    flat = [i for word in words for i in word]
    ends, total = [], 0
    for word in words:
        total += len(word)
        ends.append(total)
    width = max(len(flat), len(ends))
    return flat + [0] * (width - len(flat)), ends + [-1] * (width - len(ends))
