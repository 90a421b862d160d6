"""The models of the body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmops.gateway.schemas.request_fields import RequestModel, SamplingFields


class ContentPart(RequestModel):
    """A part of a message's content.

    Its type is `text`, `refusal`, or an image, audio or file, which have additional fields.
    """

    type: str
    text: str | None = None


class FunctionCall(RequestModel):
    """The function and arguments of an earlier tool call. `arguments` is JSON text."""

    name: str
    arguments: str | None = None


class MessageToolCall(RequestModel):
    """A tool call in an earlier message of the assistant."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class RequestMessage(RequestModel):
    """A message of the conversation."""

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
    """A function that the model may call. `parameters` is a JSON Schema."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.:-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    """A reference to a function by its name."""

    name: str


class NamedToolChoice(RequestModel):
    """A value of `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestModel):
    """The subset of the tools that the model may call."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice]


class AllowedToolsChoice(RequestModel):
    """A value of `tool_choice` that restricts calls to some tools without changing the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class ReasoningOptions(RequestModel):
    """The reasoning effort, as OpenRouter and Open WebUI send it."""

    effort: str | None = None


class ChatRequest(SamplingFields):
    """A chat completion request.

    Fields marked "Ignored" have no effect, and the response header `x-llmops-ignored` lists them.
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
    functions: list[dict[str, Any]] | None = Field(default=None, description="Not supported; use tools.")
    function_call: str | dict[str, Any] | None = Field(default=None, description="Not supported; use tool_choice.")

    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the chat template.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None

    audio: dict[str, Any] | None = Field(default=None, description="Not supported; leave it out.")
    modalities: list[str] | None = Field(default=None, description='Only ["text"] is supported.')
    web_search_options: dict[str, Any] | None = Field(default=None, description="Not supported; leave it out.")
    prediction: dict[str, Any] | None = Field(
        default=None, description="Not supported: the engines take no draft text. Leave it out."
    )
    moderation: dict[str, Any] | None = Field(default=None, description="Ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Ignored.")
    prompt_cache_retention: str | None = Field(default=None, description="Ignored.")
    store: bool | None = Field(default=None, description="Ignored.")
    verbosity: str | None = Field(default=None, description="Ignored.")
