"""The conversion of a ModelInferResponse to a TokenBatch, and of error texts to errors.

docs/contract.md describes both formats.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Sequence

from tritonclient.grpc import service_pb2

from llmops import contract
from llmops.gateway.errors import (
    ApiError,
    DrainingError,
    EngineError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from llmops.gateway.interfaces import TokenBatch

#: Maximum number of characters read of an error text. Each error text becomes a line of the log.
MAX_ERROR_LENGTH = 1000
#: Maximum length of a rejection that is passed on to the client, in characters. Longer texts are
#: not written for clients.
_MAX_REJECTION_LENGTH = 400
#: Matches internals that clients must not see: paths, shared-memory keys, addresses, source files,
#: and class names of C++ and of Python.
_INTERNALS = re.compile(
    r"(?:^|[\s\"'(=:])/\w|\b0x[0-9a-f]|\w\.(?:py|cc|cpp|cu|h|so)\b|::|llmops_|traceback|\b\d+(?:\.\d+){3}:\d",
    re.IGNORECASE,
)

#: Names of the inputs that an engine may reject in an error text, which then starts with the name.
INPUT_TENSORS = frozenset(tensor.name for tensor in (*contract.ENGINE_INPUTS, *contract.EXTENSION_INPUTS))
# bound once, because they are looked up with every token
_OUTPUT_IDS, _OUTPUT_LOG_PROBS = contract.OUTPUT_IDS.name, contract.OUTPUT_LOG_PROBS.name
_SEQUENCE_LENGTH, _SEQUENCE_INDEX = contract.SEQUENCE_LENGTH.name, contract.SEQUENCE_INDEX.name
#: Error text of NVIDIA's executor for a request that it cannot take, such as a request with too
#: long a prompt (fetchNewRequests of cpp/tensorrt_llm/executor/executorImpl.cpp, 1.2.1).
_NOT_TAKEN = "encountered an error when fetching new request"
#: Messages for clients, by the prefix with which an engine reports its own condition.
ENGINE_CONDITIONS = {
    contract.DRAINING_PREFIX: "The engine is shutting down; send the request again.",
    contract.ENGINE_DEAD_PREFIX: "The engine cannot take requests now; send the request again.",
    contract.QUEUE_FULL_PREFIX: "Too many requests wait for this model; try again in a moment.",
}


class ResponseReader:
    """A reader of the responses in one stream.

    The order of the outputs must not change within a stream unless their number does.
    """

    def __init__(self, *, logprobs: bool, sequences: int = 1, vocab_size: int = 2**31) -> None:
        self._logprobs, self._sequences, self._vocab_size = logprobs, sequences, vocab_size
        self._names = 0
        self._positions: dict[str, int] = {}

    def read(self, response: service_pb2.ModelInferResponse) -> TokenBatch | None:
        """Return the new tokens, or None for a response without tokens.

        The final response of a stream may have no tokens. Raise ValueError for impossible tokens.
        """
        count = len(response.outputs)
        if count == 0:
            return None
        if count != self._names:
            self._names = count
            self._positions = {output.name: position for position, output in enumerate(response.outputs)}
        raw, positions = response.raw_output_contents, self._positions
        tokens = _ints(raw[positions[_OUTPUT_IDS]])
        # NVIDIA's backend pads output_ids; sequence_length is the number of real ids
        if len(tokens) > 1 and _SEQUENCE_LENGTH in positions:
            tokens = tokens[: _ints(raw[positions[_SEQUENCE_LENGTH]])[0]]
        if not tokens:
            return None
        sequence = _ints(raw[positions[_SEQUENCE_INDEX]])[0] if _SEQUENCE_INDEX in positions else 0
        if not 0 <= sequence < self._sequences:
            raise ValueError(f"sequence {sequence} was not requested")
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self._vocab_size}; check vocab_size")
        return TokenBatch(sequence, tokens, self._floats(raw, len(tokens)) if self._logprobs else None)

    def _floats(self, raw: Sequence[bytes], count: int) -> list[float] | None:
        at = self._positions.get(_OUTPUT_LOG_PROBS)
        return None if at is None else trailing_floats(raw[at], count)


def trailing_floats(data: bytes, count: int) -> list[float]:
    """Return the log-probabilities of the `count` new ids.

    NVIDIA's C++ backend sends the log-probabilities of all earlier ids before them.
    """
    return list(struct.unpack_from(f"<{count}f", data, max(0, len(data) - 4 * count)))


def _ints(data: bytes) -> list[int]:
    if len(data) == 4:
        return [int.from_bytes(data, "little", signed=True)]
    return array("i", data).tolist()


def error_from_message(message: str, guided: bool = True) -> ApiError:
    """Return the error for an engine's error text.

    A text that starts with a tensor's name rejects that tensor and is meant for clients. Every
    other text becomes the error's `detail`, because it may name files, keys and addresses.

    Args:
        message: The engine's error text.
        guided: True if the failed request has a grammar. A grammar that NVIDIA's backend cannot
            read ends all requests, and only a request with a grammar may be at fault.
    """
    message = message[:MAX_ERROR_LENGTH]
    name, colon, reason = message.partition(":")
    if colon and name in INPUT_TENSORS:
        if _is_client_message(reason):
            return UnsupportedError(message, param=name)
        return UnsupportedError(
            f"{name}: the engine rejected this value; change it or leave it out.", param=name, detail=message
        )
    condition = condition_from_message(message)
    if condition is not None:
        return condition
    lowered = message.lower()
    if guided and ("xgrammar" in lowered or "grammar_compiler" in lowered):
        # some engines compile a grammar only when its request is scheduled
        refused = f"{contract.GUIDE}: the engine cannot compile this grammar; simplify it."
        return UnsupportedError(refused, param=contract.GUIDE.name, detail=message)
    if _NOT_TAKEN in lowered:
        refused = f"{contract.INPUT_IDS}: the engine cannot take this prompt; shorten it."
        return UnsupportedError(refused, param=contract.INPUT_IDS.name, detail=message)
    if "maximum queue size" in lowered:
        # Triton rejects the request itself: the model's queue is full
        return OverloadedError(ENGINE_CONDITIONS[contract.QUEUE_FULL_PREFIX], detail=message)
    if (
        "unknown model" in lowered
        or "not ready" in lowered
        or "unavailable" in lowered
        or "stopped accepting" in lowered
    ):
        return UnavailableError(ENGINE_CONDITIONS[contract.ENGINE_DEAD_PREFIX], detail=message)
    return EngineError(message)


def condition_from_message(message: str) -> UnavailableError | None:
    """Return the error for a text about the engine's own condition, or None for another text."""
    name, colon, _ = message.partition(":")
    if not colon or name not in ENGINE_CONDITIONS:
        return None
    if name == contract.DRAINING_PREFIX:
        return DrainingError(ENGINE_CONDITIONS[name])
    if name == contract.QUEUE_FULL_PREFIX:
        return OverloadedError(ENGINE_CONDITIONS[name])
    return UnavailableError(ENGINE_CONDITIONS[name], detail=message)


def _is_client_message(reason: str) -> bool:
    """Return True if a rejection was written for clients.

    Such a text is one line and names no internals of the engine.
    """
    return len(reason) <= _MAX_REJECTION_LENGTH and reason.isprintable() and _INTERNALS.search(reason) is None
