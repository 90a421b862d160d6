"""Whether replicas may stand in for each other: only then an answer can go on elsewhere, token for token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmops.gateway.fleet.catalogue import Place
from llmops.gateway.messages import ModelCard
from llmops.gateway.triton.encoder import EncoderCard

log = logging.getLogger(__name__)

# what must be the same, and how it is called in a sentence
_FIELDS = {
    "engine": "another engine",
    "tokenizer": "another tokenizer",
    "target": "another target",
    "vocab_size": "another vocabulary",
    "max_seq_len": "another context length",
    "end_ids": "other end tokens",
    "capabilities": "other capabilities",
    "chat_template": "no chat template, or one of its own",
}
_DIGESTS = ("engine", "tokenizer")
_ENCODER_FIELDS = {
    "target": "another target",
    "vocab_size": "another vocabulary",
    "max_seq_len": "another context length",
    "dimensions": "other dimensions",
}


def differences(one: ModelCard, other: ModelCard) -> str:
    """In what `other` differs, as the end of a sentence; empty where it may stand in. A digest that one of them does
    not announce is not compared; LoRA adapters may be loaded on some only, but under one id."""
    found = _different(_FIELDS, one, other)
    ids = {adapter.name: adapter.id for adapter in one.adapters}
    found += [
        f"another id for the adapter {adapter.name}"
        for adapter in other.adapters
        if ids.get(adapter.name, adapter.id) != adapter.id
    ]
    return ", ".join(found)


def encoder_differences(one: EncoderCard, other: EncoderCard) -> str:
    """The same of encoders."""
    return ", ".join(_different(_ENCODER_FIELDS, one, other))


def strangers(
    model: str, places: Sequence[Place[Any]], differences: Callable[[Any, Any], str] = differences
) -> dict[str, str]:
    """Why some of the places cannot be replicas of the others: most of them are alike, or the first ones. All gateways
    come to the same, whatever they saw first."""
    alike: list[list[Place[Any]]] = []
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


def tell(model: str, problems: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Why replicas take no part, of those of which that was not said `before`."""
    for replica, problem in problems.items():
        if before.get(replica) != problem:
            log.warning("%s takes no part in %s: %s", replica, model, problem)


def _different(fields: Mapping[str, str], one: object, other: object) -> list[str]:
    return [said for name, said in fields.items() if _differ(name, getattr(one, name), getattr(other, name))]


def _differ(name: str, one: object, other: object) -> bool:
    return one != other and not (name in _DIGESTS and not (one and other))
