"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

`cache_control` is accepted anywhere and has no effect: every prefix is cached without it. Writing
to the cache costs nothing, so `usage` counts tokens read from the cache and zero tokens written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmops.gateway.schemas.request_fields import Number, RequestModel


class ResultBlock(RequestModel):
    """A part of a tool's result or of the system prompt. Only the type `text` is supported."""

    type: str
    text: str | None = None


class ContentBlock(RequestModel):
    """A content block of a message. `type` determines which of the other fields are used."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(default=None, description="Not checked.")
    data: str | None = Field(default=None, description="The content of a redacted_thinking block; not used.")
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = Field(default=None, description="The content of a tool_result block.")
    is_error: bool | None = None


class MessageParam(RequestModel):
    """A message of the conversation.

    Consecutive messages of the same role are joined. If the last message has the role `assistant`,
    the answer continues it.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolDefinition(RequestModel):
    """A tool that the client runs.

    A tool of another type than `custom` is not offered to the model; `x-llmops-warnings` names it.
    """

    type: str | None = Field(
        default=None, description='"custom" or absent; the model is not offered a tool of another type.'
    )
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(RequestModel):
    """The choice of tools: `auto`, `any` (at least one), `tool` (tool `name`) or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(RequestModel):
    """The configuration of extended thinking.

    `budget_tokens` selects a reasoning effort, for models that have efforts.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: str | None = Field(default=None, description="Ignored.")


class OutputFormat(RequestModel):
    """The format of a structured answer: JSON that follows a JSON Schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class MessageOutputConfig(RequestModel):
    """The requested format of the answer and effort of the model."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(RequestModel):
    """Metadata of a request."""

    user_id: str | None = None


class CountTokensRequest(RequestModel):
    """A request for the number of tokens in a message's prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[ResultBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: MessageOutputConfig | None = None
    mcp_servers: list[dict[str, Any]] | None = Field(default=None, description="Rejected unless empty.")
    compaction: dict[str, Any] | None = Field(default=None, description="Not supported; leave it out.")
    thread: dict[str, Any] | None = Field(
        default=None, description="Not supported; send the whole conversation instead."
    )
    cache_control: dict[str, Any] | None = Field(default=None, description="Not needed: every prefix is cached.")
    context_management: dict[str, Any] | None = Field(default=None, description="Ignored.")
    speed: str | None = Field(default=None, description="Ignored.")


class MessagesRequest(CountTokensRequest):
    """A request for a message.

    Sampling parameters of chat completions, such as `seed` and `min_p`, are accepted too.
    """

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = Field(default=None, description="The priority of the request, as in chat completions.")
    container: str | dict[str, Any] | None = Field(default=None, description="Ignored.")
    diagnostics: dict[str, Any] | None = Field(default=None, description="Ignored.")
    inference_geo: str | None = Field(default=None, description="Ignored.")


class MessageResponse(BaseModel):
    """A message. With `stream` the message is sent as Anthropic's server-sent events."""

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
    """The number of tokens in a message's prompt."""

    input_tokens: int


class AnthropicErrorObject(BaseModel):
    """An error: its type, and a message that says what happened and what to do."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    """The body of an error response, in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None
