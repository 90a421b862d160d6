"""Compatibility of replicas: only equal models can continue each other's answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmops.gateway.interfaces import ModelMetadata
from llmops.gateway.routing.model_registry import ModelReplica
from llmops.gateway.triton.model_metadata import EncoderMetadata

log = logging.getLogger(__name__)

#: Fields of the metadata that must be equal, with the words for a difference.
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
#: Fields that are compared only if both models announce them.
_OPTIONAL_FIELDS = ("engine", "tokenizer")
_ENCODER_FIELDS = {
    "target": "another target",
    "vocab_size": "another vocabulary",
    "max_seq_len": "another context length",
    "dimensions": "other dimensions",
}


def describe_model_differences(one: ModelMetadata, other: ModelMetadata) -> str:
    """Return the differences of `other` from `one` as text, such as "another engine".

    The text is empty if the two models are compatible. An adapter may be loaded on some replicas
    only, but must have the same id on all.
    """
    differences = _describe_differences(_MODEL_FIELDS, one, other)
    ids = {adapter.name: adapter.id for adapter in one.adapters}
    differences += [
        f"another id for the adapter {adapter.name}"
        for adapter in other.adapters
        if ids.get(adapter.name, adapter.id) != adapter.id
    ]
    return ", ".join(differences)


def describe_encoder_differences(one: EncoderMetadata, other: EncoderMetadata) -> str:
    """Return the differences of the encoder `other` from `one` as text, empty if compatible."""
    return ", ".join(_describe_differences(_ENCODER_FIELDS, one, other))


def incompatible_replicas(
    model: str,
    places: Sequence[ModelReplica[Any]],
    describe: Callable[[Any, Any], str] = describe_model_differences,
) -> dict[str, str]:
    """Return the replicas of a model to exclude, each with the reason.

    All replicas outside the largest group of equal replicas are excluded. Of groups of the same
    size, the first counts, so that gateways with the same settings come to the same result.

    Args:
        model: The name of the model.
        places: The replicas of the model, in the order of the settings.
        describe: Returns the differences of two models as text, empty for equal models.
    """
    groups: list[list[ModelReplica[Any]]] = []
    for place in places:
        group = next((group for group in groups if not describe(group[0].model.card, place.model.card)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    reference = max(groups, key=len, default=[])[:1]
    return {
        place.replica: f"it has {differences}, so it is no replica of {model} on {reference[0].replica}"
        for group in groups
        for place in group
        if (differences := describe(reference[0].model.card, group[0].model.card))
    }


def log_incompatible_replicas(model: str, problems: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Log why replicas are excluded, except replicas that `before` lists with the same problem."""
    for replica, problem in problems.items():
        if before.get(replica) != problem:
            log.warning("Replica %s gets no requests for model %s: %s", replica, model, problem)


def _describe_differences(fields: Mapping[str, str], one: object, other: object) -> list[str]:
    return [words for name, words in fields.items() if _is_different(name, getattr(one, name), getattr(other, name))]


def _is_different(name: str, one: object, other: object) -> bool:
    return one != other and not (name in _OPTIONAL_FIELDS and not (one and other))
