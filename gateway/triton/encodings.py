"""The two ways that a request's tensors travel: as those of a message of its own, or as an object in a submission."""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

_SIZES = {"INT32": "i", "FP32": "f", "INT64": "q", "UINT64": "Q", "BOOL": "?"}


class TensorWriter(ABC):
    """Takes named tensors; each has a leading batch dimension of 1 where it is sent as a tensor.

    Values must fit their datatypes: that they do is checked by the engine.
    """

    @abstractmethod
    def scalar(self, name: str, datatype: str, value: float) -> None: ...

    @abstractmethod
    def text(self, name: str, value: str) -> None: ...

    @abstractmethod
    def floats(self, name: str, values: Sequence[float]) -> None:
        """FP32 [1, n]"""

    @abstractmethod
    def words(self, name: str, words: Sequence[Sequence[int]]) -> None:
        """INT32 [1, 2, n]: the flattened ids, then the cumulative end offset of each word, padded with -1."""


class MessageTensors(TensorWriter):
    """Appends to `message`, contents as raw bytes."""

    def __init__(self, message: service_pb2.ModelInferRequest) -> None:
        self._message = message

    def scalar(self, name: str, datatype: str, value: float) -> None:
        self.add(name, datatype, (1, 1), struct.pack("<" + _SIZES[datatype], value))

    def text(self, name: str, value: str) -> None:
        self.texts(name, [value.encode()])

    def texts(self, name: str, values: Sequence[bytes]) -> None:
        """BYTES [1, n]"""
        self.add(name, "BYTES", (1, len(values)), b"".join(struct.pack("<I", len(one)) + one for one in values))

    def ids(self, name: str, values: Sequence[int]) -> None:
        """INT32 [1, n]"""
        self.add(name, "INT32", (1, len(values)), array("i", values).tobytes())

    def floats(self, name: str, values: Sequence[float]) -> None:
        self.add(name, "FP32", (1, len(values)), array("f", values).tobytes())

    def words(self, name: str, words: Sequence[Sequence[int]]) -> None:
        flat, ends = _rows(words)
        self.add(name, "INT32", (1, 2, len(flat)), array("i", flat + ends).tobytes())

    def add(self, name: str, datatype: str, shape: Sequence[int], data: bytes) -> None:
        """Any tensor; `data` is what travels, little-endian."""
        self._message.inputs.add(name=name, datatype=datatype, shape=shape)
        self._message.raw_input_contents.append(data)


class ObjectTensors(TensorWriter):
    """A JSON object: scalars as numbers, the rest as arrays without the batch dimension."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def scalar(self, name: str, datatype: str, value: float) -> None:
        self._values[name] = value

    def text(self, name: str, value: str) -> None:
        self._values[name] = value

    def floats(self, name: str, values: Sequence[float]) -> None:
        self._values[name] = list(values)

    def words(self, name: str, words: Sequence[Sequence[int]]) -> None:
        self._values[name] = _rows(words)

    def encoded(self) -> bytes:
        return json.dumps(self._values).encode()


def _rows(words: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    flat = [i for word in words for i in word]
    ends, total = [], 0
    for word in words:
        total += len(word)
        ends.append(total)
    width = max(len(flat), len(ends))
    return flat + [0] * (width - len(flat)), ends + [-1] * (width - len(ends))
