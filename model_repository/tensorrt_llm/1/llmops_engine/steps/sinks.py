"""Receivers of a request's tokens. `RequestSink` sends one response per request and step.

`StepSink`, the receiver for step streams, is in `stream_server`.
"""

from __future__ import annotations

from typing import Any, Protocol

import llmops_contract as contract
import numpy as np
import triton_python_backend_utils as pb_utils

from ..engine_runtime import Alternatives, EngineState
from ..request import RuntimeRequest
from .subscription import EngineReport, StepMessage

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
#: Number of earlier tokens that a detokenizer without state receives with each response. No
#: character has as many tokens.
CONTEXT_TOKENS = 32
# names are looked up once, because they are used for every token
_OUTPUT_IDS = contract.OUTPUT_IDS.name
_SEQUENCE_LENGTH = contract.SEQUENCE_LENGTH.name
_SEQUENCE_INDEX = contract.SEQUENCE_INDEX.name
_STEP_INDEX = contract.STEP_INDEX.name
_STEP_ENTRIES = contract.STEP_ENTRIES.name
_STEP_TOKENS = contract.STEP_TOKENS.name


class ResponseSink(Protocol):
    """The receiver of one request's tokens. Only the engine thread calls its methods."""

    def begin(self, sequence: int, cached: int | None, prompt: list[Alternatives]) -> None:
        """Record facts about the prompt. Called before the first tokens of each sequence.

        Args:
            sequence: The index of the sequence whose first tokens follow.
            cached: The number of prompt tokens that were in the KV cache, or None if unknown.
            prompt: The most likely tokens in place of each prompt token after the first. Empty if
                the request does not ask for them.
        """

    def add_tokens(
        self,
        sequence: int,
        ids: list[int],
        log_probs: list[float],
        finished: bool,
        last_sequence: bool,
        tops: list[Alternatives],
    ) -> None:
        """Send new tokens of a sequence. `last_sequence` is True if the request ends with them."""

    def fail(self, message: str) -> None:
        """End the request with an error."""

    def end(self) -> None:
        """End a request that was cancelled or stopped, without sending tokens."""

    def is_cancelled(self) -> bool:
        """Return True if the client has left."""


class RequestSink:
    """A sink that sends Triton responses through the request's own sender.

    The sink sends a response per step if the request streams, otherwise a response per sequence.
    """

    __slots__ = ("_contexts", "_counts", "_cum_log_probs", "_ids", "_log_probs", "_request", "_sender")

    def __init__(self, sender: pb_utils.InferenceResponseSender, request: RuntimeRequest) -> None:
        n = request.num_sequences
        self._sender = sender
        self._request = request
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._log_probs: list[list[float]] = [[] for _ in range(n)]
        self._cum_log_probs = [0.0] * n
        self._counts = [0] * n
        self._contexts: list[list[int]] = [[] for _ in range(n)]

    def begin(self, sequence: int, cached: int | None, prompt: list[Alternatives]) -> None:
        return

    def add_tokens(
        self,
        sequence: int,
        ids: list[int],
        log_probs: list[float],
        finished: bool,
        last_sequence: bool,
        tops: list[Alternatives],
    ) -> None:
        if self._request.log_probs:
            self._cum_log_probs[sequence] += sum(log_probs)
        if not self._request.streaming:
            self._ids[sequence] += ids
            self._log_probs[sequence] += log_probs
            if not finished:
                return
            ids, log_probs = self._ids[sequence], self._log_probs[sequence]
        self._counts[sequence] += len(ids)
        response = pb_utils.InferenceResponse(self._tensors(sequence, ids, log_probs, finished))
        self._sender.send(response, flags=FINAL if last_sequence else 0)

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
            tensors.append(_tensor(contract.OUTPUT_LOG_PROBS.name, [[log_probs]], np.float32))
            tensors.append(_tensor(contract.CUM_LOG_PROBS.name, [[self._cum_log_probs[sequence]]], np.float32))
        if request.num_input_tokens:
            tensors.append(_tensor(contract.NUM_INPUT_TOKENS.name, [[request.input_ids.size]], np.int32))
        if request.num_output_tokens:
            tensors.append(_tensor(contract.NUM_OUTPUT_TOKENS.name, [[self._counts[sequence]]], np.int32))
        if request.context_ids:
            context = self._contexts[sequence]
            tensors.append(_tensor(contract.CONTEXT_IDS.name, [[context]], np.int32))
            tensors.append(_tensor(contract.FINISHED.name, [[finished]], np.bool_))
            self._contexts[sequence] = (context + ids)[-CONTEXT_TOKENS:]
        return tensors


class TritonStepSender:
    """A sender of step messages through the response sender of the subscription's own request."""

    __slots__ = ("_sender",)

    def __init__(self, sender: pb_utils.InferenceResponseSender) -> None:
        self._sender = sender

    def send(self, step: StepMessage) -> None:
        """Send one step."""
        tensors = [
            _tensor(_STEP_INDEX, [[step.index]], np.int64),
            pb_utils.Tensor(_STEP_ENTRIES, step.entries[None]),
            pb_utils.Tensor(_STEP_TOKENS, step.tokens[None]),
        ]
        if step.log_probs is not None:
            tensors.append(pb_utils.Tensor(contract.STEP_LOG_PROBS.name, step.log_probs[None]))
        if step.tops:
            counts = [len(alternatives) for alternatives in step.tops]
            pairs = [pair for alternatives in step.tops for pair in alternatives]
            tensors.append(_tensor(contract.STEP_TOP_COUNTS.name, [counts], np.int32))
            tensors.append(_tensor(contract.STEP_TOP_IDS.name, [[token for token, _ in pairs]], np.int32))
            tensors.append(_tensor(contract.STEP_TOP_LOG_PROBS.name, [[value for _, value in pairs]], np.float32))
        if step.prompt_lengths:
            tensors.append(_tensor(contract.STEP_PROMPT_LENGTHS.name, [step.prompt_lengths], np.int32))
        if step.errors:
            tensors.append(_text_tensor(contract.STEP_ERRORS.name, step.errors))
        if step.cached:
            tensors.append(_tensor(contract.STEP_CACHED.name, [step.cached], np.int32))
        if step.report is not None:
            tensors += _report_tensors(step.report)
        self._sender.send(pb_utils.InferenceResponse(tensors))

    def send_heartbeat(self, state: EngineState) -> None:
        """Send only the engine's state, between two steps. A lost state is not sent again."""
        self._sender.send(pb_utils.InferenceResponse([_tensor(contract.STEP_STATE.name, [state], np.int32)]))

    def finish(self, error: str = "") -> None:
        """End the stream, with an error unless `error` is empty."""
        if error:
            send_error(self._sender, error)
        else:
            self._sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        """Return True if the gateway has closed the stream."""
        return bool(self._sender.is_cancelled())


def _report_tensors(report: EngineReport) -> list[pb_utils.Tensor]:
    tensors = [_tensor(contract.STEP_STATE.name, [report.state], np.int32)]
    if report.kv_kinds:
        tensors.append(pb_utils.Tensor(contract.STEP_KV_HASHES.name, report.kv_hashes.view(np.int64)[None]))
        tensors.append(_tensor(contract.STEP_KV_EVENTS.name, [report.kv_kinds], np.int32))
    if report.identity:
        tensors.append(_text_tensor(contract.STEP_MODEL_IDENTITY.name, report.identity))
    return tensors


def send_error(sender: pb_utils.InferenceResponseSender, message: str) -> None:
    """End a response stream with an error."""
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message)), flags=FINAL)


def _tensor(name: str, value: Any, dtype: Any) -> pb_utils.Tensor:
    return pb_utils.Tensor(name, np.array(value, dtype=dtype))


def _text_tensor(name: str, texts: list[str] | tuple[str, ...]) -> pb_utils.Tensor:
    return _tensor(name, [[text.encode() for text in texts]], np.object_)
