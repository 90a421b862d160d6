"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

`cache_control` is accepted anywhere. Every prefix is cached without it, and writing costs nothing:
`usage` counts what was read from the cache, and nothing as written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmops.gateway.schemas.request_fields import Number, RequestModel


class ResultBlock(RequestModel):
    """A part of a tool's result or of the system prompt. Only `text` is supported."""

    type: str
    text: str | None = None


class ContentBlock(RequestModel):
    """One block of a message. `type` decides which of the fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(default=None, description="Not checked.")
    data: str | None = Field(default=None, description="Of redacted_thinking; not used.")
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = Field(default=None, description="Of a tool_result.")
    is_error: bool | None = None


class MessageParam(RequestModel):
    """One message.

    Consecutive messages of one role are joined; a last message of the assistant begins the answer.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolDefinition(RequestModel):
    """A tool that the client runs.

    A tool of any other type is left out, and `x-llmops-warnings` names it.
    """

    type: str | None = Field(default=None, description='"custom" or absent; a tool of another type is left out.')
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(RequestModel):
    """The choice of tools: `auto`, `any` (at least one), `tool` (the one called `name`) or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(RequestModel):
    """Extended thinking. `budget_tokens` bounds it for models that have degrees of effort."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: str | None = Field(default=None, description="Ignored.")


class OutputFormat(RequestModel):
    """The JSON Schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class MessageOutputConfig(RequestModel):
    """The format of the answer, and the effort of the model."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(RequestModel):
    """Metadata of the request."""

    user_id: str | None = None


class CountTokensRequest(RequestModel):
    """A request for the number of tokens of a message's prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[ResultBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: MessageOutputConfig | None = None
    mcp_servers: list[dict[str, Any]] | None = Field(default=None, description="Refused unless empty.")
    compaction: dict[str, Any] | None = Field(default=None, description="Refused.")
    thread: dict[str, Any] | None = Field(default=None, description="Refused: send the whole conversation.")
    cache_control: dict[str, Any] | None = Field(default=None, description="Every prefix is cached without it.")
    context_management: dict[str, Any] | None = Field(default=None, description="Ignored.")
    speed: str | None = Field(default=None, description="Ignored.")


class MessagesRequest(CountTokensRequest):
    """A request for one message.

    Sampling extras of chat completions (`seed`, `min_p`, …) work here too.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = Field(default=None, description="As in chat completions.")
    container: str | dict[str, Any] | None = Field(default=None, description="Ignored.")
    diagnostics: dict[str, Any] | None = Field(default=None, description="Ignored.")
    inference_geo: str | None = Field(default=None, description="Ignored.")


class MessageResponse(BaseModel):
    """A message. With `stream` it is sent as Anthropic's server-sent events."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    """The number of tokens of a message's prompt."""

    input_tokens: int


class AnthropicErrorObject(BaseModel):
    """An error: its kind, and a message with the reason and a remedy."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    """Anthropic's envelope of an error."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None
