"""Compatibility of replicas: only equal models can continue each other's answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from llmops.gateway.routing.model_registry import ModelReplica

log = logging.getLogger(__name__)

#: Fields of the metadata of models and encoders that must be equal.
_FIELDS = (
    *("engine", "tokenizer", "target", "vocab_size", "max_seq_len", "end_ids", "capabilities", "chat_template"),
    "dimensions",
)
#: Fields that are compared only if both models announce them.
_OPTIONAL_FIELDS = ("engine", "tokenizer")


def describe_differences(one: Any, other: Any) -> str:
    """Return the differences of the metadata `other` from `one` as text, such as "another engine".

    The text is empty if the two models are compatible. An adapter may be loaded on some replicas
    only, but must have the same id on all.
    """
    differences = [
        f"another {name}"
        for name in _FIELDS
        if _is_different(name, getattr(one, name, None), getattr(other, name, None))
    ]
    ids = {adapter.name: adapter.id for adapter in getattr(one, "adapters", ())}
    differences += [
        f"another id for the adapter {adapter.name}"
        for adapter in getattr(other, "adapters", ())
        if ids.get(adapter.name, adapter.id) != adapter.id
    ]
    return ", ".join(differences)


def incompatible_replicas(model: str, places: Sequence[ModelReplica[Any]]) -> dict[str, str]:
    """Return the replicas of a model to exclude, each with the reason.

    All replicas outside the largest group of equal replicas are excluded. Of groups of the same
    size, the first counts, so that gateways with the same settings come to the same result.

    Args:
        model: The name of the model.
        places: The replicas of the model, in the order of the settings.
    """
    groups: list[list[ModelReplica[Any]]] = []
    for place in places:
        group = next(
            (group for group in groups if not describe_differences(group[0].model.card, place.model.card)), None
        )
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    reference = max(groups, key=len, default=[])[:1]
    return {
        place.replica: f"it has {differences}, so it is no replica of {model} on {reference[0].replica}"
        for group in groups
        for place in group
        if (differences := describe_differences(reference[0].model.card, group[0].model.card))
    }


def log_incompatible_replicas(model: str, problems: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Log why replicas are excluded, except replicas that `before` lists with the same problem."""
    for replica, problem in problems.items():
        if before.get(replica) != problem:
            log.warning("Replica %s gets no requests for model %s: %s", replica, model, problem)


def _is_different(name: str, one: object, other: object) -> bool:
    return one != other and not (name in _OPTIONAL_FIELDS and not (one and other))
