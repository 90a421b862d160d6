"""The conversion of an EngineRequest to the tensors of the contract, in two encodings.

The tensors are sent either in a ModelInferRequest of their own, or as a JSON object in a submission
to a step stream. Their names, types and meanings are those of TensorRT-LLM's `tensorrt_llm` model;
see docs/contract.md.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from llmops import contract
from llmops.contract import BOOL, FP32, INT32, INT64, UINT64, Tensor
from llmops.gateway.interfaces import EngineRequest, ModelMetadata

_PACK = {
    datatype: struct.Struct(form).pack
    for datatype, form in {INT32: "<i", FP32: "<f", INT64: "<q", UINT64: "<Q", BOOL: "<?"}.items()
}


class TensorWriter(ABC):
    """A writer of the contract's tensors.

    Shapes are given with the leading batch dimension of 1. Values must fit their datatypes; the
    engine checks them.
    """

    @abstractmethod
    def scalar(self, tensor: Tensor, value: float) -> None: ...

    @abstractmethod
    def text(self, tensor: Tensor, value: str) -> None: ...

    @abstractmethod
    def floats(self, tensor: Tensor, values: Sequence[float]) -> None:
        """Write numbers as FP32 [1, n]."""

    @abstractmethod
    def words(self, tensor: Tensor, words: Sequence[Sequence[int]]) -> None:
        """Write a list of words, each given as token ids, as INT32 [1, 2, n].

        Row 0 has the token ids of all words, row 1 the cumulative end offset of each word, padded
        with -1.
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
        """Write strings as BYTES [1, n]."""
        self.add(tensor, (1, len(values)), b"".join(struct.pack("<I", len(one)) + one for one in values))

    def ids(self, tensor: Tensor, values: Sequence[int]) -> None:
        """Write token ids as INT32 [1, n]."""
        self.add(tensor, (1, len(values)), array("i", values).tobytes())

    def floats(self, tensor: Tensor, values: Sequence[float]) -> None:
        self.add(tensor, (1, len(values)), array("f", values).tobytes())

    def words(self, tensor: Tensor, words: Sequence[Sequence[int]]) -> None:
        flat, ends = _pack_words(words)
        self.add(tensor, (1, 2, len(flat)), array("i", flat + ends).tobytes())

    def add(self, tensor: Tensor, shape: Sequence[int], data: bytes) -> None:
        """Write any tensor.

        Args:
            tensor: Name and datatype of the tensor.
            shape: Shape of the tensor, with the batch dimension.
            data: Contents of the tensor, little-endian.
        """
        self._add_input(name=tensor.name, datatype=tensor.datatype, shape=shape)
        self._add_content(data)


class JsonTensorWriter(TensorWriter):
    """A writer that collects tensors in a JSON object.

    Scalars become JSON numbers. All other tensors become arrays without the batch dimension.
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


class RequestWriter:
    """A writer of the requests to one engine model."""

    def __init__(
        self,
        model: str,
        *,
        vocab_size: int,
        pad_id: int | None,
        callers: bool = False,
        salts: bool = False,
        extensions: bool = True,
    ) -> None:
        """Create a writer.

        Args:
            model: Name of the model in Triton.
            vocab_size: Number of tokens in the vocabulary.
            pad_id: Id of the padding token, or None if the model has no such token.
            callers: True if the model has the input `caller`.
            salts: True if the model has the input `cache_salt`.
            extensions: True if the model has the inputs that NVIDIA's backend lacks.
        """
        self.model = model
        self.vocab_size = vocab_size
        self._pad_id = pad_id
        self._callers = callers
        self._salts = salts
        self._unknown = frozenset(() if extensions else contract.EXTENSION_INPUTS)

    @classmethod
    def of(cls, model: str, card: ModelMetadata) -> RequestWriter:
        can = card.capabilities
        return cls(
            model,
            vocab_size=card.vocab_size,
            pad_id=card.pad_id,
            callers=can.callers,
            # a block's hash includes the salt even if the library does not separate salts in its
            # cache
            salts=can.cache_salt or card.kv_events,
            extensions=contract.STEP_TRANSPORT in card.transports,
        )

    def write(self, request: EngineRequest) -> service_pb2.ModelInferRequest:
        message = service_pb2.ModelInferRequest(model_name=self.model, id=request.request_id)
        message.parameters[contract.EMPTY_FINAL_PARAMETER].bool_param = True
        tensors = MessageTensorWriter(message)
        tensors.ids(contract.INPUT_IDS, request.input_ids)
        self.write_rest(request, tensors)
        return message

    def write_rest(self, request: EngineRequest, tensors: TensorWriter) -> None:
        """Write all tensors of `request` except `input_ids`."""
        tensors.scalar(contract.INPUT_LENGTHS, len(request.input_ids))
        tensors.scalar(contract.REQUEST_OUTPUT_LEN, request.max_tokens)
        tensors.scalar(contract.STREAMING, request.streaming)
        self._write_endings(tensors, request)
        self._write_sampling(tensors, request)
        self._write_extras(tensors, request)

    def _write_endings(self, tensors: TensorWriter, request: EngineRequest) -> None:
        tensors.scalar(contract.END_ID, request.end_ids[0] if request.end_ids else -1)
        if self._pad_id is not None:
            tensors.scalar(contract.PAD_ID, self._pad_id)
        others = [(token,) for token in request.end_ids[1:]]
        # Until min_tokens, NVIDIA's C++ backend suppresses END_ID alone: its minimum-length penalty
        # masks only that token. The model's other end tokens are therefore banned.
        banned = others if request.min_tokens and self._unknown else []
        if stop_words := [*(() if banned else others), *request.stop_words]:
            tensors.words(contract.STOP_WORDS_LIST, stop_words)
        if bad_words := [*banned, *request.bad_words]:
            tensors.words(contract.BAD_WORDS_LIST, bad_words)
        if request.min_tokens:
            tensors.scalar(contract.MIN_TOKENS, request.min_tokens)

    def _write_sampling(self, tensors: TensorWriter, request: EngineRequest) -> None:
        sampling = request.sampling
        if sampling.temperature == 0:
            # request greedy sampling explicitly: the engine's defaults differ between versions
            tensors.scalar(contract.RUNTIME_TOP_K, 1)
        else:
            tensors.scalar(contract.TEMPERATURE, sampling.temperature)
            tensors.scalar(contract.RUNTIME_TOP_K, sampling.top_k)
            tensors.scalar(contract.RUNTIME_TOP_P, sampling.top_p)
            if sampling.min_p:
                tensors.scalar(contract.RUNTIME_MIN_P, sampling.min_p)
        if sampling.seed is not None:
            tensors.scalar(contract.SEED, sampling.seed)
        if sampling.repetition_penalty != 1:
            tensors.scalar(contract.REPETITION_PENALTY, sampling.repetition_penalty)
        if sampling.presence_penalty:
            tensors.scalar(contract.PRESENCE_PENALTY, sampling.presence_penalty)
        if sampling.frequency_penalty:
            tensors.scalar(contract.FREQUENCY_PENALTY, sampling.frequency_penalty)

    def _write_extras(self, tensors: TensorWriter, request: EngineRequest) -> None:
        if request.n > 1:
            tensors.scalar(contract.NUM_RETURN_SEQUENCES, request.n)
        if request.logprobs:
            tensors.scalar(contract.RETURN_LOG_PROBS, True)
        if request.top_logprobs:
            tensors.scalar(contract.TOP_LOG_PROBS, request.top_logprobs)
        if request.prompt_logprobs is not None:
            tensors.scalar(contract.PROMPT_LOG_PROBS, request.prompt_logprobs)
        if request.sampling.logit_bias:
            tensors.floats(contract.EMBEDDING_BIAS, self._dense_bias(request.sampling.logit_bias))
        if request.cache_salt and self._salts:
            tensors.scalar(contract.CACHE_SALT, request.cache_salt)
        if request.guide is not None:
            tensors.text(contract.GUIDE_TYPE, request.guide.kind)
            tensors.text(contract.GUIDE, request.guide.text)
            if self._callers and request.caller:
                tensors.text(contract.CALLER, request.caller)
        for tensor, value in request.extras.items():
            if tensor not in self._unknown:
                tensors.scalar(tensor, value)

    def _dense_bias(self, bias: Mapping[int, float]) -> array[float]:
        dense = array("f", bytes(4 * self.vocab_size))
        for token, value in bias.items():
            dense[token] = value
        return dense
