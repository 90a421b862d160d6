"""State, identity and cache events that an engine reports in its step stream."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from llmops import contract
from llmops.gateway.errors import ApiError

_STATE, _IDENTITY = contract.STEP_STATE.name, contract.STEP_MODEL_IDENTITY.name
#: Cache events, and names of blocks, in one message. Engines send half as many.
MAX_CACHE_EVENTS = 2**17
_KV, _KINDS = contract.STEP_KV_HASHES.name, contract.STEP_KV_EVENTS.name


class EngineState(NamedTuple):
    """The numbers of the tensor `step_state`; contract.STATE_FIELDS describes them."""

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
    """The engine that answers; `instance` is new each time the model is loaded."""

    model: str
    version: str
    engine: str
    instance: str


class EngineObserver(Protocol):
    """A receiver of an engine's reports, called on the event loop between two messages."""

    def on_state(self, state: EngineState) -> None: ...

    def on_cache_event(self, kind: int, hashes: Sequence[int]) -> None:
        """Handle stored or removed blocks, by hash.

        `kind` is KV_STORED, KV_REMOVED or KV_CLEARED of the contract.
        """

    def on_identity(self, identity: EngineIdentity) -> None: ...

    def on_disconnect(self, error: ApiError) -> None:
        """Handle the error that ended the stream. The stream is opened again afterwards."""


def notify_observer(observer: EngineObserver, outputs: Mapping[str, int], raw: Sequence[bytes]) -> None:
    """Pass the reports of a message to `observer`.

    `outputs` maps each output to its index in `raw`.

    Raises:
        ValueError: The engine reports more than it can have.
    """
    if _IDENTITY in outputs:
        fields = [*islice(decode_strings(raw[outputs[_IDENTITY]]), len(EngineIdentity._fields) + 1)]
        if len(fields) == len(EngineIdentity._fields):
            observer.on_identity(EngineIdentity(*fields))
    if _KINDS in outputs:
        names, kinds, at = raw[outputs[_KV]], raw[outputs[_KINDS]], 0
        if max(len(names), len(kinds)) > 8 * MAX_CACHE_EVENTS:
            raise ValueError(f"{len(kinds) // 8} cache events of {len(names) // 8} blocks in one message")
        hashes = array("Q", names)
        for kind, count in struct.iter_unpack("<2i", kinds):
            if count < 0:
                raise ValueError(f"a cache event of {count} blocks")
            observer.on_cache_event(kind, hashes[at : at + count])
            at += count
    if _STATE in outputs:
        numbers = array("i", raw[outputs[_STATE]])
        # a later version may append numbers
        if len(numbers) >= len(EngineState._fields):
            observer.on_state(EngineState(*numbers[: len(EngineState._fields)]))


def decode_strings(data: bytes) -> Iterator[str]:
    """Yield the elements of a BYTES tensor: each is a little-endian length and that many bytes."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + size].decode("utf-8", "replace")
        at += 4 + size
