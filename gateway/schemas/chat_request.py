"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmops.gateway.schemas.request_fields import RequestModel, SamplingFields


class ContentPart(RequestModel):
    """One part of a message.

    It is `text`, `refusal`, or an image, audio or file part with fields of its own.
    """

    type: str
    text: str | None = None


class FunctionCall(RequestModel):
    """A call of an earlier assistant message. `arguments` is JSON text."""

    name: str
    arguments: str | None = None


class MessageToolCall(RequestModel):
    """A tool call in the history."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class RequestMessage(RequestModel):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | dict[str, Any] | None = None


class FunctionDefinition(RequestModel):
    """A function that the model may call; `parameters` is its JSON Schema."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    """The name of a function."""

    name: str


class NamedToolChoice(RequestModel):
    """`tool_choice` that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    """The subset of tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolsChoice(RequestModel):
    """`tool_choice` that narrows the tools without changing the prompt's list."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class ReasoningOptions(RequestModel):
    """OpenRouter's and Open WebUI's spelling of reasoning_effort."""

    effort: str | None = None


class ChatRequest(SamplingFields):
    """A chat completion request.

    Fields marked "ignored" are listed in the answer's `x-llmops-ignored` header.
    """

    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="Same as max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = Field(default=None, description="Refused: use tools.")
    function_call: str | dict[str, Any] | None = Field(default=None, description="Refused: use tool_choice.")

    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None

    audio: dict[str, Any] | None = Field(default=None, description="Refused.")
    modalities: list[str] | None = Field(default=None, description='Only ["text"].')
    web_search_options: dict[str, Any] | None = Field(default=None, description="Refused.")
    prediction: dict[str, Any] | None = Field(default=None, description="Refused: no engine here takes a draft text.")
    moderation: dict[str, Any] | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(default=None, description="Requests with equal keys prefer the same replica.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Ignored.")
    prompt_cache_retention: str | None = Field(default=None, description="Ignored.")
    safety_identifier: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="The caller's user, for the audit log; with the scope fairness, a share of its own."
    )
    service_tier: str | None = Field(
        default=None, description="A tier of the settings that is not above the key's; else the key's tier."
    )
    store: bool | None = Field(default=None, description="Ignored.")
    verbosity: str | None = Field(default=None, description="Ignored.")
