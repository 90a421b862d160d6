"""The reports that an engine sends in its step stream: its state, identity and cache events."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from llmops import contract
from llmops.gateway.errors import ApiError

_STATE, _IDENTITY = contract.STEP_STATE.name, contract.STEP_MODEL_IDENTITY.name
#: Maximum number of cache events, and of block names, in one message; more are an error. Engines
#: send at most half as many.
MAX_CACHE_EVENTS = 2**17
_KV, _KINDS = contract.STEP_KV_HASHES.name, contract.STEP_KV_EVENTS.name


class EngineState(NamedTuple):
    """The load of an engine, as reported in the tensor `step_state`.

    contract.STATE_FIELDS describes each number.
    """

    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    blocks: int
    tokens_per_block: int
    prefill_tokens: int
    step_us: int
    subscribers: int
    demand: int
    draining: int
    next_slot: int


class EngineIdentity(NamedTuple):
    """The identity of the engine that answers. `instance` changes each time the model is loaded."""

    model: str
    version: str
    engine: str
    instance: str


class EngineObserver(Protocol):
    """A receiver of an engine's reports.

    The methods run on the event loop, between two messages of the engine.
    """

    def on_state(self, state: EngineState) -> None: ...

    def on_cache_event(self, kind: int, hashes: Sequence[int]) -> None:
        """Handle stored or removed blocks.

        Args:
            kind: KV_STORED, KV_REMOVED or KV_CLEARED of the contract.
            hashes: Hashes of the blocks.
        """

    def on_identity(self, identity: EngineIdentity) -> None: ...

    def on_disconnect(self, error: ApiError) -> None:
        """Handle the error that ended the stream.

        The transport opens the stream again afterwards.
        """


def notify_observer(observer: EngineObserver, outputs: Mapping[str, int], raw: Sequence[bytes]) -> None:
    """Pass the reports in a message to `observer`.

    Args:
        observer: The receiver of the reports.
        outputs: The index in `raw` of each output of the message, by name.
        raw: The contents of the outputs.

    Raises:
        ValueError: A report is larger than any engine sends, or has a negative count.
    """
    if _IDENTITY in outputs:
        fields = [*islice(decode_strings(raw[outputs[_IDENTITY]]), len(EngineIdentity._fields) + 1)]
        if len(fields) == len(EngineIdentity._fields):
            observer.on_identity(EngineIdentity(*fields))
    if _KINDS in outputs:
        names, kinds, at = raw[outputs[_KV]], raw[outputs[_KINDS]], 0
        if max(len(names), len(kinds)) > 8 * MAX_CACHE_EVENTS:
            raise ValueError(
                f"a message has {len(kinds) // 8} cache events of {len(names) // 8} blocks, which are too many"
            )
        hashes = array("Q", names)
        for kind, count in struct.iter_unpack("<2i", kinds):
            if count < 0:
                raise ValueError(f"a cache event has {count} blocks, which is negative")
            observer.on_cache_event(kind, hashes[at : at + count])
            at += count
    if _STATE in outputs:
        numbers = array("i", raw[outputs[_STATE]])
        # a later version of the contract may append numbers
        if len(numbers) >= len(EngineState._fields):
            observer.on_state(EngineState(*numbers[: len(EngineState._fields)]))


def decode_strings(data: bytes) -> Iterator[str]:
    """Yield the strings of a BYTES tensor.

    Each string is preceded by its length in bytes, a little-endian uint32.
    """
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + size].decode("utf-8", "replace")
        at += 4 + size
