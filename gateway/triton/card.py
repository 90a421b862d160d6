"""`llmops_card`: what an engine model announces of itself in Triton's ModelConfig, read into a ModelCard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmops.contract import CARD, CONTRACT
from llmops.errors import InputError, first_fault
from llmops.gateway.messages import Adapter, Capabilities, GuideKind, ModelCard, SamplingDefaults


class _Capabilities(BaseModel):
    model_config = ConfigDict(extra="ignore")

    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    guided: tuple[GuideKind, ...] = ()
    bad_words: bool = False
    min_p: bool = False
    callers: bool = False
    seed: bool = True
    penalties: bool = True
    lora: bool = False
    cache_salt: bool = False


class _Sampling(BaseModel):
    model_config = ConfigDict(extra="ignore")

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


class _Adapter(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    id: int


class _Card(BaseModel):
    model_config = ConfigDict(extra="allow")

    contract: int = CONTRACT
    name: str
    target: str = "unknown"
    tokenizer_dir: str
    max_batch_size: int = 1
    max_seq_len: Annotated[int, Field(gt=1)]
    vocab_size: Annotated[int, Field(gt=0)]
    bos_id: int | None = None
    end_ids: tuple[int, ...]
    pad_id: int | None = None
    chat_template: bool = True
    sampling: _Sampling = _Sampling()
    capabilities: _Capabilities = _Capabilities()
    adapters: tuple[_Adapter, ...] = ()
    transports: tuple[str, ...] = ("request",)
    state: bool = False
    kv_events: bool = False
    cached_tokens: bool = False
    batch_invariant: bool = False
    engine: str = ""
    tokenizer: str = ""
    built: int = 0


def parse_card(text: str, overrides: Mapping[str, Any] | None = None) -> ModelCard:
    """`overrides` (from the gateway's configuration) win. Raises InputError when it cannot be understood."""
    try:
        raw = json.loads(text) if text else {}
        card = _Card.model_validate({**raw, **(overrides or {})})
    except ValidationError as error:
        raise InputError(f"the model's {CARD} cannot be used ({first_fault(error)})") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"the model's {CARD} is not a JSON object: {error}") from error
    if card.contract != CONTRACT:
        raise InputError(
            f"the model speaks contract {card.contract}, this gateway {CONTRACT}; use the same llmops version for both"
        )
    return _to_message(card)


def _to_message(card: _Card) -> ModelCard:
    fields = {name: getattr(card, name) for name in _Card.model_fields if name != "contract"}
    fields["capabilities"] = Capabilities(**card.capabilities.model_dump())
    fields["sampling"] = SamplingDefaults(**card.sampling.model_dump())
    fields["adapters"] = tuple(Adapter(adapter.name, adapter.id) for adapter in card.adapters)
    return ModelCard(**fields, extra=card.model_extra or {})
