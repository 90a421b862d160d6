"""Whether replicas may stand in for each other: only then an answer can go on elsewhere, token for token."""

from __future__ import annotations

from llmops.gateway.messages import ModelCard

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


def differences(one: ModelCard, other: ModelCard) -> str:
    """In what `other` differs, as the end of a sentence; empty where it may stand in. A digest that one of them does
    not announce is not compared; LoRA adapters may be loaded on some only, but under one id."""
    found = [said for name, said in _FIELDS.items() if _differ(name, getattr(one, name), getattr(other, name))]
    ids = {adapter.name: adapter.id for adapter in one.adapters}
    found += [
        f"another id for the adapter {adapter.name}"
        for adapter in other.adapters
        if ids.get(adapter.name, adapter.id) != adapter.id
    ]
    return ", ".join(found)


def _differ(name: str, one: object, other: object) -> bool:
    return one != other and not (name in _DIGESTS and not (one and other))
