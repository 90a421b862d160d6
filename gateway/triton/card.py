"""`llmops_card`: what an engine model announces of itself in Triton's ModelConfig, read into a ModelCard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmops.contract import CARD, CONTRACT
from llmops.errors import InputError, first_fault
from llmops.gateway.messages import ModelCard

_CARD = TypeAdapter(ModelCard)
_KNOWN = {one.name for one in fields(ModelCard)} - {"extra"}


def parse_card(text: str, overrides: Mapping[str, Any] | None = None) -> ModelCard:
    """`overrides` (from the gateway's configuration) win. Raises InputError when it cannot be understood."""
    try:
        raw = {"target": "unknown", **(json.loads(text) if text else {}), **(overrides or {})}
        contract = raw.pop("contract", CONTRACT)
        extra = {name: raw.pop(name) for name in raw.keys() - _KNOWN}
        card = _CARD.validate_python({**raw, "extra": extra})
    except ValidationError as error:
        raise InputError(f"the model's {CARD} cannot be used ({first_fault(error)})") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"the model's {CARD} is not a JSON object: {error}") from error
    if contract != CONTRACT:
        raise InputError(
            f"the model speaks contract {contract}, this gateway {CONTRACT}; use the same llmops version for both"
        )
    return card
