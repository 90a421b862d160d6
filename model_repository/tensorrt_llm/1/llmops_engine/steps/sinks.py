"""Where a request's tokens go: `RequestSink`, one response per request and step, or `StepSink` (service.py)."""

from __future__ import annotations

from typing import Any, Protocol

import llmops_contract as contract
import numpy as np
import triton_python_backend_utils as pb_utils

from ..engine_runtime import Alternatives, EngineState
from ..request import RuntimeRequest
from .subscription import EngineReport, StepMessage

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# how many earlier tokens a stateless detokeniser gets with each response
CONTEXT_TOKENS = 32
# bound once: these are used for every token
_OUTPUT_IDS = contract.OUTPUT_IDS.name
_SEQUENCE_LENGTH = contract.SEQUENCE_LENGTH.name
_SEQUENCE_INDEX = contract.SEQUENCE_INDEX.name
_OUTPUT_LOG_PROBS = contract.OUTPUT_LOG_PROBS.name
_CUM_LOG_PROBS = contract.CUM_LOG_PROBS.name
_NUM_INPUT_TOKENS = contract.NUM_INPUT_TOKENS.name
_NUM_OUTPUT_TOKENS = contract.NUM_OUTPUT_TOKENS.name
_CONTEXT_IDS = contract.CONTEXT_IDS.name
_FINISHED = contract.FINISHED.name
_STEP_INDEX = contract.STEP_INDEX.name
_STEP_ENTRIES = contract.STEP_ENTRIES.name
_STEP_TOKENS = contract.STEP_TOKENS.name
_STEP_LOG_PROBS = contract.STEP_LOG_PROBS.name
_STEP_TOP_COUNTS, _STEP_TOP_IDS = contract.STEP_TOP_COUNTS.name, contract.STEP_TOP_IDS.name
_STEP_TOP_LOG_PROBS = contract.STEP_TOP_LOG_PROBS.name
_STEP_ERRORS = contract.STEP_ERRORS.name
_STEP_CACHED = contract.STEP_CACHED.name
_STEP_STATE = contract.STEP_STATE.name
_STEP_KV, _STEP_KV_KINDS = contract.STEP_KV_HASHES.name, contract.STEP_KV_EVENTS.name
_STEP_SERVED = contract.STEP_MODEL_IDENTITY.name


class ResponseSink(Protocol):
    """All calls come from the engine thread. `last_sequence`: nothing follows for the whole request."""

    def begin(self, sequence: int, cached: int | None) -> None:
        """Before the first tokens: how many of the prompt were in the KV cache; None: not known."""

    def tokens(
        self,
        sequence: int,
        ids: list[int],
        log_probs: list[float],
        finished: bool,
        last_sequence: bool,
        tops: list[Alternatives],
    ) -> None: ...

    def fail(self, message: str) -> None: ...

    def end(self) -> None:
        """The request was cancelled or stopped: say so without tokens."""

    def is_cancelled(self) -> bool: ...


class RequestSink:
    """One Triton response per step (`streaming`) or per sequence, through the request's own response sender."""

    __slots__ = ("_contexts", "_counts", "_cum", "_ids", "_log_probs", "_request", "_sender")

    def __init__(self, sender: pb_utils.InferenceResponseSender, request: RuntimeRequest) -> None:
        n = request.num_sequences
        self._sender = sender
        self._request = request
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._log_probs: list[list[float]] = [[] for _ in range(n)]
        self._cum = [0.0] * n
        self._counts = [0] * n
        self._contexts: list[list[int]] = [[] for _ in range(n)]

    def tokens(
        self,
        sequence: int,
        ids: list[int],
        log_probs: list[float],
        finished: bool,
        last_sequence: bool,
        tops: list[Alternatives],
    ) -> None:
        request = self._request
        if request.log_probs:
            self._cum[sequence] += sum(log_probs)
        if not request.streaming:
            self._ids[sequence] += ids
            self._log_probs[sequence] += log_probs
            if not finished:
                return
            ids, log_probs = self._ids[sequence], self._log_probs[sequence]
        self._counts[sequence] += len(ids)
        response = pb_utils.InferenceResponse(self._tensors(sequence, ids, log_probs, finished))
        self._sender.send(response, flags=FINAL if last_sequence else 0)

    def begin(self, sequence: int, cached: int | None) -> None:
        return

    def fail(self, message: str) -> None:
        send_error(self._sender, message)

    def end(self) -> None:
        self._sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _tensors(self, sequence: int, ids: list[int], log_probs: list[float], finished: bool) -> list[pb_utils.Tensor]:
        request = self._request
        tensors = [
            _tensor(_OUTPUT_IDS, [[ids]], np.int32),
            _tensor(_SEQUENCE_LENGTH, [[len(ids)]], np.int32),
            _tensor(_SEQUENCE_INDEX, [[sequence]], np.int32),
        ]
        if request.log_probs:
            tensors.append(_tensor(_OUTPUT_LOG_PROBS, [[log_probs]], np.float32))
            tensors.append(_tensor(_CUM_LOG_PROBS, [[self._cum[sequence]]], np.float32))
        if request.num_input_tokens:
            tensors.append(_tensor(_NUM_INPUT_TOKENS, [[request.input_ids.size]], np.int32))
        if request.num_output_tokens:
            tensors.append(_tensor(_NUM_OUTPUT_TOKENS, [[self._counts[sequence]]], np.int32))
        if request.context_ids:
            context = self._contexts[sequence]
            tensors.append(_tensor(_CONTEXT_IDS, [[context]], np.int32))
            tensors.append(_tensor(_FINISHED, [[finished]], np.bool_))
            self._contexts[sequence] = (context + ids)[-CONTEXT_TOKENS:]
        return tensors


class TritonStepSender:
    """Step messages through the response sender of the subscription's own request."""

    __slots__ = ("_sender",)

    def __init__(self, sender: pb_utils.InferenceResponseSender) -> None:
        self._sender = sender

    def send(self, step: StepMessage) -> None:
        tensors = [
            _tensor(_STEP_INDEX, [[step.index]], np.int64),
            pb_utils.Tensor(_STEP_ENTRIES, step.entries[None]),
            pb_utils.Tensor(_STEP_TOKENS, step.tokens[None]),
        ]
        if step.log_probs is not None:
            tensors.append(pb_utils.Tensor(_STEP_LOG_PROBS, step.log_probs[None]))
        if step.tops:
            pairs = [pair for place in step.tops for pair in place]
            tensors.append(_tensor(_STEP_TOP_COUNTS, [[len(place) for place in step.tops]], np.int32))
            tensors.append(_tensor(_STEP_TOP_IDS, [[token for token, _ in pairs]], np.int32))
            tensors.append(_tensor(_STEP_TOP_LOG_PROBS, [[value for _, value in pairs]], np.float32))
        if step.errors:
            tensors.append(_tensor(_STEP_ERRORS, [[error.encode() for error in step.errors]], np.object_))
        if step.cached:
            tensors.append(_tensor(_STEP_CACHED, [step.cached], np.int32))
        if step.report is not None:
            tensors += _report(step.report)
        self._sender.send(pb_utils.InferenceResponse(tensors))

    def beat(self, state: EngineState) -> None:
        self._sender.send(pb_utils.InferenceResponse([_tensor(_STEP_STATE, [state], np.int32)]))

    def finish(self, error: str = "") -> None:
        if error:
            send_error(self._sender, error)
        else:
            self._sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _report(report: EngineReport) -> list[pb_utils.Tensor]:
    tensors = [_tensor(_STEP_STATE, [report.state], np.int32)]
    if report.kinds:
        tensors.append(pb_utils.Tensor(_STEP_KV, report.names.view(np.int64)[None]))
        tensors.append(_tensor(_STEP_KV_KINDS, [report.kinds], np.int32))
    if report.served:
        tensors.append(_tensor(_STEP_SERVED, [[text.encode() for text in report.served]], np.object_))
    return tensors


def send_error(sender: pb_utils.InferenceResponseSender, message: str) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message)), flags=FINAL)


def _tensor(name: str, value: Any, dtype: Any) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(value, dtype=dtype))
