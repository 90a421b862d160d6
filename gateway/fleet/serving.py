"""What the endpoints see of the models: a served model with everything that a request to it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from llmops.gateway.messages import Engine, ModelCard
from llmops.gateway.text.template import ChatTemplate
from llmops.gateway.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name of GET /v1/models. An adapter has its base model's parts, `parent` and `lora_id`."""

    name: str
    card: ModelCard
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    engine: Engine
    parent: str | None = None
    lora_id: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """How models stand now: `ready` has names with the model that serves each (an adapter's is its parent), `broken`
    has names with what is wrong, in a sentence for clients; `problem` is what keeps all of them from being known.
    """

    ready: Mapping[str, str] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


class Models(Protocol):
    """Where endpoints find models."""

    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFoundError, or UnavailableError while the models are not known (Triton is down)."""
        ...

    def all(self) -> list[ServedModel]: ...

    def is_ready(self, name: str) -> bool: ...

    def problems(self) -> Mapping[str, str]:
        """Models that cannot serve now, known ones and others, and why, in a sentence for clients."""
        ...
