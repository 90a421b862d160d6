"""The bodies of POST /v1/messages and /v1/messages/count_tokens.

`cache_control` may stand anywhere: it is taken, and changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmops.gateway.schemas.request_fields import Number, RequestModel


class ResultBlock(RequestModel):
    """A part of a tool's result, or of the system prompt: `text`. Images and documents are refused."""

    type: str
    text: str | None = None


class ContentBlock(RequestModel):
    """One block of a message; `type` says which of the fields it has."""

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
    """One message; several of one role in a row are one. A last one of the assistant is the beginning of the answer."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolDefinition(RequestModel):
    """A tool that the client runs. A tool of any other type is left out, and `x-llmops-warnings` names it."""

    type: str | None = Field(default=None, description='"custom" or absent; a tool of another type is left out.')
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(RequestModel):
    """Whether tools are to be used: as the model likes, at least one, the one with `name`, none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(RequestModel):
    """Whether the model thinks first. `budget_tokens` is how much at most, where the model knows degrees of it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: str | None = Field(default=None, description="Ignored.")


class OutputFormat(RequestModel):
    """The JSON Schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class MessageOutputConfig(RequestModel):
    """What the answer is to look like, and how much effort goes into it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(RequestModel):
    """Who asked."""

    user_id: str | None = None


class CountTokensRequest(RequestModel):
    """What makes up the prompt."""

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
    cache_control: dict[str, Any] | None = Field(default=None, description="Ignored.")
    context_management: dict[str, Any] | None = Field(default=None, description="Ignored.")
    speed: str | None = Field(default=None, description="Ignored.")


class MessagesRequest(CountTokensRequest):
    """A request for one message. Sampling extras of chat completions (`seed`, `min_p`, …) work here too."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = Field(default=None, description="Ignored.")
    container: str | dict[str, Any] | None = Field(default=None, description="Ignored.")
    diagnostics: dict[str, Any] | None = Field(default=None, description="Ignored.")
    inference_geo: str | None = Field(default=None, description="Ignored.")


class MessageResponse(BaseModel):
    """A message. With `stream` it comes as Anthropic's server-sent events."""

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
    """Tokens of the prompt that a message would have."""

    input_tokens: int


class AnthropicErrorObject(BaseModel):
    """What went wrong, why, and what to do."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    """Anthropic's envelope of an error."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None
