"""What an engine model says about itself in its step stream, for whoever watches it."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from llmops import contract
from llmops.gateway.errors import ApiError

_STATE, _IDENTITY = contract.STEP_STATE.name, contract.STEP_MODEL_IDENTITY.name
_KV, _KINDS = contract.STEP_KV_HASHES.name, contract.STEP_KV_EVENTS.name


class EngineState(NamedTuple):
    """The numbers of `step_state`; contract.STATE_FIELDS says what they mean."""

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
    """Who answers; `instance` is new each time the model is loaded."""

    model: str
    version: str
    engine: str
    instance: str


class EngineObserver(Protocol):
    """Called in the event loop, between two messages."""

    def heard(self, state: EngineState) -> None: ...

    def changed(self, kind: int, hashes: Sequence[int]) -> None:
        """`kind` of the contract: KV_STORED, KV_REMOVED, KV_CLEARED."""

    def served(self, who: EngineIdentity) -> None: ...

    def lost(self, error: ApiError) -> None:
        """The stream ended; it is opened again."""


def notify_observer(watcher: EngineObserver, outputs: Mapping[str, int], raw: Sequence[bytes]) -> None:
    """Pass on what a message says about the engine. `outputs`: where each output is in `raw`."""
    if _IDENTITY in outputs:
        who = decode_strings(raw[outputs[_IDENTITY]])
        if len(who) == len(EngineIdentity._fields):
            watcher.served(EngineIdentity(*who))
    if _KINDS in outputs:
        hashes, at = array("Q", raw[outputs[_KV]]), 0
        for kind, count in struct.iter_unpack("<2i", raw[outputs[_KINDS]]):
            watcher.changed(kind, hashes[at : at + count])
            at += count
    if _STATE in outputs:
        numbers = array("i", raw[outputs[_STATE]])
        # a later version may say more
        if len(numbers) >= len(EngineState._fields):
            watcher.heard(EngineState(*numbers[: len(EngineState._fields)]))


def decode_strings(data: bytes) -> list[str]:
    """Triton's BYTES: each element is a little-endian length and that many bytes."""
    texts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(data[at + 4 : at + 4 + size].decode("utf-8", "replace"))
        at += 4 + size
    return texts
