"""Which RoPE scalings there are; apart from rope.py so that looking does not import numpy."""

from __future__ import annotations

from typing import Any

ROPE_KINDS = ("default", "linear", "llama3")


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and the latter's factors, from the spelling of any transformers version."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = nested.get("rope_type") or nested.get("type") or "default"
    theta = config.get("rope_theta") or nested.get("rope_theta") or 10000.0
    return {**nested, "rope_type": kind, "rope_theta": float(theta)}


def rope_kind(config: dict[str, Any]) -> str:
    return str(rope_parameters(config)["rope_type"])
