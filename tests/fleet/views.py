"""Replicas and requests for the tests of what decides about them."""

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

from llmops.gateway.interfaces import QueuedRequest, ReplicaView, RoutingRequest


def view(name: str, **fields: Any) -> ReplicaView:
    """A ready replica with nothing to do: 10,000 prompt tokens/s, steps of 20 ms, a cache of 1,000 blocks of 4."""
    known = {
        "state": "ready", "blocks": 1000, "free_blocks": 1000, "tokens_per_block": 4, "prefill_rate": 10_000.0,
        "step_seconds": 0.02, "max_batch_size": 8,
    }  # fmt: skip
    return ReplicaView(name, **{**known, **fields})


def wanted(ids: Sequence[int], **fields: Any) -> RoutingRequest:
    return RoutingRequest(len(ids), struct.pack(f"<{len(ids)}i", *ids), **{"answer": 10, **fields})


def ticket(tenant: str = "a", tokens: int = 100, answer: int = 10, arrived: float = 0, **fields: Any) -> QueuedRequest:
    return QueuedRequest(tenant, RoutingRequest(tokens, answer=answer, hashes=()), arrived, **fields)


async def settled() -> None:
    """All that can happen without another token has happened."""
    for _ in range(20):
        await asyncio.sleep(0)
