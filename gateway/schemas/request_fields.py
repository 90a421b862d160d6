"""Fields that requests of several APIs share, and the request of text completions.

Validation is strict: "1" is not a number and 1 is not a boolean, so wrong types are rejected and
never guessed. Every optional field accepts null, because clients send it. Unknown fields are kept
in `model_extra` and reported as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from llmops.gateway.http.request_body import FailFastModel

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestModel(FailFastModel):
    """Base of the bodies of requests to models."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True)


def _check_biases(biases: dict[str, Any]) -> dict[str, float]:
    # pydantic itself would collect an error for each wrong value of a mapping
    for token, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            text = "'{token}' needs a number from -100 to 100"
            raise PydanticCustomError("bias_value", text, {"token": token[:20]})  # type: ignore[arg-type]
    return biases


def _check_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    if len(metadata) > 16:
        raise PydanticCustomError("metadata_length", "it has more than 16 entries")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > 64 or len(value) > 512:
            raise PydanticCustomError(
                "metadata_value", "keys have at most 64 characters, values are texts of at most 512"
            )
    return metadata


# A mapping from token ids, as text, to biases.
Biases = Annotated[
    dict[str, Any],
    AfterValidator(_check_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
# A mapping of text to text within OpenAI's bounds.
Metadata = Annotated[
    dict[str, Any],
    AfterValidator(_check_metadata),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        }
    ),
]


class StreamOptions(RequestModel):
    """Options of a stream. `include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(RequestModel):
    """The `json_schema` part of a response_format. `schema` is the JSON Schema itself."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The format of an answer: text, json_object, or json_schema with its schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(RequestModel):
    """Parameters of sampling and of the end of an answer.

    OpenAI's fields come first, then those of vLLM and SGLang.
    """

    model: str
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
    logit_bias: Biases | None = Field(default=None, description="Token id (as text) to bias.")
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Alternatives to each prompt token, which the answer lists with its own."
    )
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class CompletionRequest(SamplingFields):
    """A text completion request. `prompt` is one text, one list of token ids, or a list of either."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="16 when absent.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="Alternatives per token; 0 returns the chosen tokens only."
    )
    echo: bool | None = Field(default=None, description="The prompt before each text; not with logprobs.")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Generate this many and return the n most likely ones."
    )
    suffix: str | None = Field(default=None, description="Refused.")
    add_special_tokens: bool | None = None
