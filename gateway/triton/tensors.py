"""EngineRequest to ModelInferRequest and ModelInferResponse to TokenBatch: the tensor contract as raw bytes.

Tensor names, types and meanings are those of TensorRT-LLM's `tensorrt_llm` model; see docs/contract.md.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence

from tritonclient.grpc import service_pb2

from llmops.gateway.errors import ApiError, EngineError, UnavailableError, UnsupportedError
from llmops.gateway.messages import EngineRequest, TokenBatch

FINAL_FLAG = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
INPUT_TENSORS = frozenset(
    {
        "input_ids",
        "input_lengths",
        "request_output_len",
        "end_id",
        "pad_id",
        "stop_words_list",
        "bad_words_list",
        "runtime_top_k",
        "runtime_top_p",
        "runtime_min_p",
        "temperature",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_tokens",
        "seed",
        "return_log_probs",
        "num_return_sequences",
        "embedding_bias",
        "lora_task_id",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
    }
)
_SIZES = {"INT32": "i", "FP32": "f", "INT64": "q", "UINT64": "Q", "BOOL": "?"}


class RequestWriter:
    """Builds the requests of one engine model."""

    def __init__(self, model: str, *, vocab_size: int, pad_id: int | None) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._pad_id = pad_id

    def write(self, request: EngineRequest) -> service_pb2.ModelInferRequest:
        message = service_pb2.ModelInferRequest(model_name=self._model, id=request.request_id)
        message.parameters[EMPTY_FINAL].bool_param = True
        self._write_request(_Tensors(message), request)
        return message

    def submit(self, request: EngineRequest, subscription: str, slot: int) -> service_pb2.ModelInferRequest:
        """A request whose tokens come in the subscription's steps. Nothing but an error answers the message itself."""
        message = service_pb2.ModelInferRequest(model_name=self._model, id=str(slot))
        tensors = _Tensors(message)
        self._write_request(tensors, request)
        tensors.text("subscription", subscription)
        tensors.scalar("slot", "INT32", slot)
        return message

    def subscribe(self, subscription: str, resume_from: int) -> service_pb2.ModelInferRequest:
        message = self._control(subscription, "resume_from", "INT64", resume_from)
        message.id = subscription
        message.parameters[EMPTY_FINAL].bool_param = True
        return message

    def acknowledge(self, subscription: str, step: int) -> service_pb2.ModelInferRequest:
        return self._control(subscription, "acknowledge", "INT64", step)

    def cancel(self, subscription: str, slot: int) -> service_pb2.ModelInferRequest:
        message = self._control(subscription, "slot", "INT32", slot)
        _Tensors(message).scalar("stop", "BOOL", True)
        return message

    def _control(self, subscription: str, name: str, datatype: str, value: int) -> service_pb2.ModelInferRequest:
        """A message that is no request; the two tensors that NVIDIA's contract requires are 0 then."""
        message = service_pb2.ModelInferRequest(model_name=self._model)
        tensors = _Tensors(message)
        tensors.scalar("input_lengths", "INT32", 0)
        tensors.scalar("request_output_len", "INT32", 0)
        tensors.text("subscription", subscription)
        tensors.scalar(name, datatype, value)
        return message

    def _write_request(self, tensors: _Tensors, request: EngineRequest) -> None:
        tensors.add("input_ids", "INT32", [1, len(request.input_ids)], array("i", request.input_ids).tobytes())
        tensors.scalar("input_lengths", "INT32", len(request.input_ids))
        tensors.scalar("request_output_len", "INT32", request.max_tokens)
        tensors.scalar("streaming", "BOOL", request.streaming)
        self._write_endings(tensors, request)
        self._write_sampling(tensors, request)
        self._write_extras(tensors, request)

    def _write_endings(self, tensors: _Tensors, request: EngineRequest) -> None:
        tensors.scalar("end_id", "INT32", request.end_ids[0] if request.end_ids else -1)
        if self._pad_id is not None:
            tensors.scalar("pad_id", "INT32", self._pad_id)
        stop_words = [(i,) for i in request.end_ids[1:]] + list(request.stop_words)
        if stop_words:
            tensors.words("stop_words_list", stop_words)
        if request.bad_words:
            tensors.words("bad_words_list", request.bad_words)
        if request.min_tokens:
            tensors.scalar("min_tokens", "INT32", request.min_tokens)

    def _write_sampling(self, tensors: _Tensors, request: EngineRequest) -> None:
        sampling = request.sampling
        if sampling.temperature == 0:
            # greedy; the engine's own defaults differ between versions, so nothing is left to them
            tensors.scalar("runtime_top_k", "INT32", 1)
        else:
            tensors.scalar("temperature", "FP32", sampling.temperature)
            tensors.scalar("runtime_top_k", "INT32", sampling.top_k)
            tensors.scalar("runtime_top_p", "FP32", sampling.top_p)
            if sampling.min_p:
                tensors.scalar("runtime_min_p", "FP32", sampling.min_p)
        if sampling.seed is not None:
            tensors.scalar("seed", "UINT64", sampling.seed)
        if sampling.repetition_penalty != 1:
            tensors.scalar("repetition_penalty", "FP32", sampling.repetition_penalty)
        if sampling.presence_penalty:
            tensors.scalar("presence_penalty", "FP32", sampling.presence_penalty)
        if sampling.frequency_penalty:
            tensors.scalar("frequency_penalty", "FP32", sampling.frequency_penalty)

    def _write_extras(self, tensors: _Tensors, request: EngineRequest) -> None:
        if request.n > 1:
            tensors.scalar("num_return_sequences", "INT32", request.n)
        if request.logprobs:
            tensors.scalar("return_log_probs", "BOOL", True)
        if request.sampling.logit_bias:
            tensors.add("embedding_bias", "FP32", [1, self._vocab_size], self._dense_bias(request.sampling.logit_bias))
        if request.guide is not None:
            tensors.text("guided_decoding_guide_type", request.guide.kind)
            tensors.text("guided_decoding_guide", request.guide.text)
        if request.lora_id is not None:
            tensors.scalar("lora_task_id", "UINT64", request.lora_id)

    def _dense_bias(self, bias: Mapping[int, float]) -> bytes:
        dense = array("f", bytes(4 * self._vocab_size))
        for token, value in bias.items():
            dense[token] = value
        return dense.tobytes()


class _Tensors:
    """Appends named tensors to a request."""

    def __init__(self, message: service_pb2.ModelInferRequest) -> None:
        self._message = message

    def add(self, name: str, datatype: str, shape: Sequence[int], data: bytes) -> None:
        self._message.inputs.add(name=name, datatype=datatype, shape=shape)
        self._message.raw_input_contents.append(data)

    def scalar(self, name: str, datatype: str, value: float) -> None:
        self.add(name, datatype, (1, 1), struct.pack("<" + _SIZES[datatype], value))

    def text(self, name: str, value: str) -> None:
        data = value.encode()
        self.add(name, "BYTES", (1, 1), struct.pack("<I", len(data)) + data)

    def words(self, name: str, words: Sequence[Sequence[int]]) -> None:
        """[1, 2, n]: the flattened ids, then the cumulative end offset of each word, padded with -1."""
        flat = [i for word in words for i in word]
        ends, total = [], 0
        for word in words:
            total += len(word)
            ends.append(total)
        width = max(len(flat), len(ends))
        rows = flat + [0] * (width - len(flat)) + ends + [-1] * (width - len(ends))
        self.add(name, "INT32", (1, 2, width), array("i", rows).tobytes())


class ResponseReader:
    """Reads the responses of one stream; remembers where the outputs are, which does not change within it."""

    __slots__ = ("_logprobs", "_names", "_positions")

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs
        self._names = 0
        self._positions: dict[str, int] = {}

    def read(self, response: service_pb2.ModelInferResponse) -> TokenBatch | None:
        """The new tokens, or None for a response without any (an empty final one)."""
        count = len(response.outputs)
        if count == 0:
            return None
        if count != self._names:
            self._names = count
            self._positions = {output.name: position for position, output in enumerate(response.outputs)}
        raw = response.raw_output_contents
        tokens = self._tokens(raw)
        if not tokens:
            return None
        return TokenBatch(self._sequence(raw), tokens, self._floats(raw, len(tokens)) if self._logprobs else None)

    def _tokens(self, raw: Sequence[bytes]) -> list[int]:
        tokens = _ints(raw[self._positions["output_ids"]])
        at = self._positions.get("sequence_length")
        # NVIDIA's backend pads output_ids; sequence_length says how many of them are real
        if at is not None and len(tokens) > 1:
            return tokens[: _ints(raw[at])[0]]
        return tokens

    def _sequence(self, raw: Sequence[bytes]) -> int:
        at = self._positions.get("sequence_index")
        return 0 if at is None else _ints(raw[at])[0]

    def _floats(self, raw: Sequence[bytes], count: int) -> list[float] | None:
        at = self._positions.get("output_log_probs")
        if at is None:
            return None
        return list(struct.unpack_from(f"<{count}f", raw[at]))


def _ints(data: bytes) -> list[int]:
    if len(data) == 4:
        return [int.from_bytes(data, "little", signed=True)]
    values = array("i", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def error_of(message: str) -> ApiError:
    """What an engine's error text means. A text that starts with a tensor's name is the engine's refusal of it."""
    name, colon, _ = message.partition(":")
    if colon and name in INPUT_TENSORS:
        return UnsupportedError(message, param=name)
    lowered = message.lower()
    if "xgrammar" in lowered or "grammar_compiler" in lowered:
        # some engines compile a grammar only when they get to it; their own text names files of their build
        return UnsupportedError("guided_decoding_guide: the engine cannot compile it.", param="guided_decoding_guide")
    if "unknown model" in lowered or "not ready" in lowered or "unavailable" in lowered or "draining" in lowered:
        return UnavailableError(f"The engine cannot take requests now: {message}")
    return EngineError(f"The engine failed: {message}")
