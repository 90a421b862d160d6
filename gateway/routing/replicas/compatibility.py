"""Whether replicas may stand in for each other: only then an answer can go on elsewhere, token for token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.routing.model_registry import ModelReplica
from llmops.gateway.triton.encoder_client import EncoderMetadata

log = logging.getLogger(__name__)

# what must be the same, and how it is called in a sentence
_MODEL_FIELDS = {
    "engine": "another engine",
    "tokenizer": "another tokenizer",
    "target": "another target",
    "vocab_size": "another vocabulary",
    "max_seq_len": "another context length",
    "end_ids": "other end tokens",
    "capabilities": "other capabilities",
    "chat_template": "no chat template, or one of its own",
}
_OPTIONAL_FIELDS = ("engine", "tokenizer")
_ENCODER_FIELDS = {
    "target": "another target",
    "vocab_size": "another vocabulary",
    "max_seq_len": "another context length",
    "dimensions": "other dimensions",
}


def differences(one: ModelMetadata, other: ModelMetadata) -> str:
    """In what `other` differs, as the end of a sentence; empty where it may stand in. A digest that one of them does
    not announce is not compared; LoRA adapters may be loaded on some only, but under one id."""
    found = _describe_differences(_MODEL_FIELDS, one, other)
    ids = {adapter.name: adapter.id for adapter in one.adapters}
    found += [
        f"another id for the adapter {adapter.name}"
        for adapter in other.adapters
        if ids.get(adapter.name, adapter.id) != adapter.id
    ]
    return ", ".join(found)


def encoder_differences(one: EncoderMetadata, other: EncoderMetadata) -> str:
    """The same of encoders."""
    return ", ".join(_describe_differences(_ENCODER_FIELDS, one, other))


def incompatible_replicas(
    model: str, places: Sequence[ModelReplica[Any]], differences: Callable[[Any, Any], str] = differences
) -> dict[str, str]:
    """Why some of the places cannot be replicas of the others: most of them are alike, or the first ones. All gateways
    come to the same, whatever they saw first."""
    alike: list[list[ModelReplica[Any]]] = []
    for place in places:
        own = next((some for some in alike if not differences(some[0].model.card, place.model.card)), None)
        if own is None:
            alike.append([place])
        else:
            own.append(place)
    first = max(alike, key=len, default=[])[:1]
    return {
        place.replica: f"it has {said}, so it is no replica of {model} on {first[0].replica}"
        for some in alike
        for place in some
        if (said := differences(first[0].model.card, some[0].model.card))
    }


def log_incompatible_replicas(model: str, problems: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Why replicas take no part, of those of which that was not said `before`."""
    for replica, problem in problems.items():
        if before.get(replica) != problem:
            log.warning("%s takes no part in %s: %s", replica, model, problem)


def _describe_differences(fields: Mapping[str, str], one: object, other: object) -> list[str]:
    return [said for name, said in fields.items() if _is_different(name, getattr(one, name), getattr(other, name))]


def _is_different(name: str, one: object, other: object) -> bool:
    return one != other and not (name in _OPTIONAL_FIELDS and not (one and other))
