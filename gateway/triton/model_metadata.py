"""`llmops_model_metadata`: what an engine model announces of itself in Triton's ModelConfig, read into a ModelMetadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmops.contract import CONTRACT_VERSION, METADATA_PARAMETER
from llmops.errors import InputError, first_validation_error
from llmops.gateway.interfaces import ModelMetadata

_ADAPTER = TypeAdapter(ModelMetadata)
_KNOWN_FIELDS = {one.name for one in fields(ModelMetadata)} - {"extra"}


def parse_model_metadata(text: str, overrides: Mapping[str, Any] | None = None) -> ModelMetadata:
    """`overrides` (from the gateway's configuration) win. Raises InputError when it cannot be understood."""
    try:
        raw = {"target": "unknown", **(json.loads(text) if text else {}), **(overrides or {})}
        contract = raw.pop("contract", CONTRACT_VERSION)
        extra = {name: raw.pop(name) for name in raw.keys() - _KNOWN_FIELDS}
        card = _ADAPTER.validate_python({**raw, "extra": extra})
    except ValidationError as error:
        raise InputError(
            f"the model's {METADATA_PARAMETER} cannot be used ({first_validation_error(error)})"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"the model's {METADATA_PARAMETER} is not a JSON object: {error}") from error
    if contract != CONTRACT_VERSION:
        raise InputError(
            f"the model speaks contract {contract}, this gateway {CONTRACT_VERSION}; use the same llmops version for both"
        )
    return card
