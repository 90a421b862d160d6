"""Fields that the requests of several APIs share, and the text completion request.

Validation is strict: "1" is not a number and 1 is not a boolean, so values of a wrong type are
rejected and never converted. Every optional field accepts null, because clients send null. Unknown
fields are kept in `model_extra` and reported as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from llmops.gateway.http.request_body import FailFastModel

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestModel(FailFastModel):
    """A base of the models of request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True)


def _check_biases(biases: dict[str, Any]) -> dict[str, float]:
    # For a wrong value of a mapping, pydantic itself would collect one error per value.
    for token, bias in biases.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            text = "'{token}' needs a number from -100 to 100"
            raise PydanticCustomError("bias_value", text, {"token": token[:20]})  # type: ignore[arg-type]
    return biases


def _check_metadata(metadata: dict[str, Any]) -> dict[str, str]:
    if len(metadata) > 16:
        raise PydanticCustomError("metadata_length", "it has more than 16 entries; leave some out")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > 64 or len(value) > 512:
            raise PydanticCustomError(
                "metadata_value", "keys must have at most 64 characters, and values must be strings of at most 512"
            )
    return metadata


# Mapping of token ids, which are JSON strings, to biases.
Biases = Annotated[
    dict[str, Any],
    AfterValidator(_check_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
# Mapping of strings to strings, with OpenAI's limits on their number and length.
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
    """The `json_schema` field of a `response_format`, whose field `schema` is the JSON Schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The format of an answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(RequestModel):
    """The fields of a generation request: sampling, stop conditions and constraints.

    OpenAI's fields come first, then fields of vLLM and SGLang.
    """

    model: str
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = Field(
        default=None, description="The sampling temperature; 0 is greedy. By default the model's own default, else 1."
    )
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = Field(default=None, description="Nucleus sampling.")
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="The number of answers to generate."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        default=None,
        description="The seed of sampling. Best effort, because batching may change the last bits of a logit.",
    )
    stop: str | list[str] | None = Field(
        default=None, description="Strings that end the answer and are not part of it."
    )
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = Field(default=None, description="The bias of each token, by token id (as a string).")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = Field(
        default=None,
        description="A key for requests that share a prefix; requests with equal keys prefer the same replica.",
    )
    safety_identifier: Annotated[str, Field(max_length=64)] | None = Field(
        default=None,
        description="The caller's end user, for the audit log. With the scope fairness, a user has its own fair share.",
    )
    service_tier: str | None = Field(
        default=None, description="A tier that is not above the key's tier; other values select the key's tier."
    )

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="The number of most likely tokens to sample from; 0 or -1 for all."
    )
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = Field(
        default=None, description="Continue to max_tokens even if the model ends the answer."
    )
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="The number of alternatives per prompt token to return with log-probabilities."
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
    """A text completion request.

    `prompt` is a text, a list of token ids, or a list of texts or of lists of token ids.
    """

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="16 when absent.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="The number of alternatives per token; 0 returns only the chosen tokens."
    )
    echo: bool | None = Field(default=None, description="Not supported; leave it out.")
    best_of: int | None = Field(default=None, description="Only the value of `n` is supported.")
    suffix: str | None = Field(default=None, description="Not supported; leave it out.")
    add_special_tokens: bool | None = None
