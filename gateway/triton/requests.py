"""EngineRequest to the tensors of the contract, and to the ModelInferRequest that has a gRPC stream of its own.

Tensor names, types and meanings are those of TensorRT-LLM's `tensorrt_llm` model; see docs/contract.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from tritonclient.grpc import service_pb2

from llmops.gateway.messages import EngineRequest
from llmops.gateway.triton.encodings import MessageTensors, TensorWriter
from llmops.gateway.triton.tensors import EMPTY_FINAL


class RequestWriter:
    """Builds the requests of one engine model."""

    def __init__(self, model: str, *, vocab_size: int, pad_id: int | None, callers: bool = False) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._pad_id = pad_id
        self._callers = callers

    def write(self, request: EngineRequest) -> service_pb2.ModelInferRequest:
        message = service_pb2.ModelInferRequest(model_name=self.model, id=request.request_id)
        message.parameters[EMPTY_FINAL].bool_param = True
        tensors = MessageTensors(message)
        tensors.ids("input_ids", request.input_ids)
        self.write_rest(request, tensors)
        return message

    def write_rest(self, request: EngineRequest, tensors: TensorWriter) -> None:
        """All tensors but `input_ids`."""
        tensors.scalar("input_lengths", "INT32", len(request.input_ids))
        tensors.scalar("request_output_len", "INT32", request.max_tokens)
        tensors.scalar("streaming", "BOOL", request.streaming)
        self._write_endings(tensors, request)
        self._write_sampling(tensors, request)
        self._write_extras(tensors, request)

    def _write_endings(self, tensors: TensorWriter, request: EngineRequest) -> None:
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

    def _write_sampling(self, tensors: TensorWriter, request: EngineRequest) -> None:
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

    def _write_extras(self, tensors: TensorWriter, request: EngineRequest) -> None:
        if request.n > 1:
            tensors.scalar("num_return_sequences", "INT32", request.n)
        if request.logprobs:
            tensors.scalar("return_log_probs", "BOOL", True)
        if request.sampling.logit_bias:
            tensors.floats("embedding_bias", self._dense_bias(request.sampling.logit_bias))
        if request.guide is not None:
            tensors.text("guided_decoding_guide_type", request.guide.kind)
            tensors.text("guided_decoding_guide", request.guide.text)
            if self._callers and request.caller:
                tensors.text("caller", request.caller)
        if request.lora_id is not None:
            tensors.scalar("lora_task_id", "UINT64", request.lora_id)

    def _dense_bias(self, bias: Mapping[int, float]) -> array[float]:
        dense = array("f", bytes(4 * self._vocab_size))
        for token, value in bias.items():
            dense[token] = value
        return dense
