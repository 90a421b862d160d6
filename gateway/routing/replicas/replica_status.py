"""What a gateway believes of its replicas, for those who ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.replicas.replica import Replica


def summarize_capacity(views: Sequence[ReplicaView]) -> dict[str, Any]:
    """Return how many replicas there are, can take requests and are measured, and the sums over those that can."""
    ready = [view for view in views if view.state == "ready"]
    return {
        "replicas": {
            "ready": len(ready),
            "total": len(views),
            "measured": sum(view.source == "measured" for view in views),
        },
        "capacity": {
            "sequences": sum(view.max_batch_size for view in ready),
            "running": sum(view.running for view in ready),
            "waiting": sum(view.waiting + view.unseen for view in ready),
            "kv_tokens": sum(view.blocks * view.tokens_per_block for view in ready),
            "kv_tokens_free": sum(view.free_blocks * view.tokens_per_block for view in ready),
        },
    }


def describe_replicas(replicas: Iterable[Replica], problems: dict[str, str]) -> list[dict[str, Any]]:
    """One line of GET /replicas each; those that take no part have a problem."""
    lines = [_describe_replica(one, problems.get(one.replica_id, one.problem)) for one in replicas]
    known = {line["replica"] for line in lines}
    return [*lines, *(describe_excluded_replica(one, why) for one, why in problems.items() if one not in known)]


def describe_excluded_replica(replica: str, problem: str) -> dict[str, Any]:
    """The line of one that takes no part."""
    return {"replica": replica, "state": "gone", "problem": problem}


def _describe_replica(replica: Replica, problem: str) -> dict[str, Any]:
    view, silent = replica.view, replica.silent()
    return {
        "replica": view.replica_id,
        "version": view.version,
        "state": view.state,
        "source": view.source,
        "problem": problem,
        "last_update_seconds_ago": None if silent is None else round(silent, 1),
        "running": view.running,
        "waiting": view.waiting + view.unseen,
        "own": replica.open_streams,
        "kv_blocks_free": view.free_blocks,
        "kv_blocks": view.blocks,
        "step_ms": round(view.step_seconds * 1e3, 1),
        "prefill_tokens_per_second": round(view.prefill_rate),
        "gateways": view.subscribers,
    }
