"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmops.gateway.schemas.request_fields import Metadata, Number, RequestModel


class TextFormat(RequestModel):
    """The format of an answer: text, json_object, or json_schema.

    The schema is a field of the format, not nested as in chat completions.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """The format of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description="Ignored.")


class ReasoningChoice(RequestModel):
    """The effort of reasoning. Summaries are not supported."""

    effort: str | None = None
    summary: str | None = Field(default=None, description="Ignored.")


class ResponsesRequest(RequestModel):
    """A responses request.

    `input` is text or a list of items; sampling extras are those of chat completions.
    """

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = Field(default=None, description="A system message; not kept for the next turn.")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = Field(
        default=None,
        description="Functions, alone or in namespaces. Other types are left out, and x-llmops-warnings names them.",
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningChoice | None = None
    stream: bool | None = None
    store: bool | None = Field(default=None, description="true when absent; the store is bounded.")
    background: bool | None = Field(default=None, description="Answer at once, generate meanwhile; needs store.")
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(default=None, description='Only "disabled".')
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="Refused unless 0.")
    conversation: str | dict[str, Any] | None = Field(
        default=None, description="Its items stand before `input`, and input and answer are added to it."
    )
    prompt: dict[str, Any] | None = Field(default=None, description="Refused.")
    client_metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
    include: list[str] | None = Field(default=None, description="Ignored.")
    max_tool_calls: int | None = Field(default=None, description="Ignored: it is about built-in tools.")
    service_tier: str | None = Field(default=None, description="As in chat completions.")
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = Field(default=None, description="As in chat completions.")
    prompt_cache_retention: str | None = Field(default=None, description="Ignored.")
    stream_options: dict[str, Any] | None = Field(default=None, description="Ignored.")
