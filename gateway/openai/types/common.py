"""Fields that chat completions, completions and responses share.

Strict: "1" is no number and 1 no boolean, so wrong types are refused and never guessed. Every optional field takes
null, because clients send it; unknown fields are kept in `model_extra` and listed to the client as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Wire(BaseModel):
    """Base of everything that comes from a client."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True)


class StreamOptions(Wire):
    """`include_usage`: an extra last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Wire):
    """The `json_schema` part of a response_format. `schema` is the JSON Schema itself."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """text, json_object, or json_schema with its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(Wire):
    """How tokens are chosen and when to stop: OpenAI's fields, then those of vLLM and SGLang."""

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(
        default=None, description="0 is greedy. Absent: the model's own default, else 1."
    )
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(default=None, description="Nucleus sampling.")
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="How many answers to generate.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        default=None, description="Best effort: batching may change the last bits of a logit."
    )
    stop: str | list[str] | None = Field(default=None, description="Strings that end the answer; never sent.")
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = Field(
        default=None, description="Token id (as text) to bias."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(default=None, description="0 or -1: no limit.")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = Field(default=None, description="Go on to max_tokens whatever the model says.")
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
