"""The state of replicas for GET /replicas and GET /v1/models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmops.gateway.interfaces import ReplicaView
from llmops.gateway.routing.replicas.replica import Replica


def summarize_capacity(views: Sequence[ReplicaView]) -> dict[str, Any]:
    """Return the number of replicas by state, and the sums over the ready replicas."""
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
            "waiting": sum(view.waiting + view.in_flight for view in ready),
            "kv_tokens": sum(view.blocks * view.tokens_per_block for view in ready),
            "kv_tokens_free": sum(view.free_blocks * view.tokens_per_block for view in ready),
        },
    }


def describe_replicas(replicas: Iterable[Replica], problems: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row of GET /replicas for each replica, including excluded replicas."""
    rows = [_describe_replica(replica, problems.get(replica.replica_id, replica.problem)) for replica in replicas]
    shown = {row["replica"] for row in rows}
    return [*rows, *(describe_excluded_replica(*item) for item in problems.items() if item[0] not in shown)]


def describe_excluded_replica(replica: str, problem: str) -> dict[str, Any]:
    """Return the row of a replica that is excluded because of `problem`."""
    return {"replica": replica, "state": "gone", "problem": problem}


def _describe_replica(replica: Replica, problem: str) -> dict[str, Any]:
    view, silent_seconds = replica.view, replica.silent_seconds()
    return {
        "replica": view.replica_id,
        "version": view.version,
        "state": view.state,
        "source": view.source,
        "problem": problem,
        "last_update_seconds_ago": None if silent_seconds is None else round(silent_seconds, 1),
        "running": view.running,
        "waiting": view.waiting + view.in_flight,
        "own": replica.open_streams,
        "kv_blocks_free": view.free_blocks,
        "kv_blocks": view.blocks,
        "step_ms": round(view.step_seconds * 1e3, 1),
        "prefill_tokens_per_second": round(view.prefill_rate),
        "gateways": view.subscribers,
    }
