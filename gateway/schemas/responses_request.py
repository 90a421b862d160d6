"""The models of the body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmops.gateway.schemas.request_fields import Metadata, Number, RequestModel


class TextFormat(RequestModel):
    """The format of an answer: text, any JSON object, or JSON that follows a schema.

    The schema is a field of the format, and not nested as in chat completions.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description="Ignored.")


class ReasoningChoice(RequestModel):
    """The effort of reasoning. Summaries of reasoning are not supported."""

    effort: str | None = None
    summary: str | None = Field(default=None, description="Ignored.")


class ConversationReference(RequestModel):
    """A reference to a conversation."""

    id: str


class ResponsesRequest(RequestModel):
    """A request for a response.

    `input` is a text or a list of items. Sampling parameters of chat completions are accepted too.
    """

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = Field(default=None, description="A system message for this response only.")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = Field(
        default=None,
        description="Functions, alone or in namespaces. The model is not offered other tools (see x-llmops-warnings).",
    )
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningChoice | None = None
    stream: bool | None = None
    store: bool | None = Field(
        default=None, description="Keep the response for later requests; true by default. Old responses are deleted."
    )
    background: bool | None = Field(
        default=None, description="Respond immediately and generate in the background; needs store."
    )
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    metadata: Metadata | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(default=None, description='Only "disabled" is supported.')
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="Rejected unless 0.")
    conversation: str | ConversationReference | None = Field(
        default=None,
        description="The conversation to continue: its items precede `input`, and input and answer are added to it.",
    )
    prompt: dict[str, Any] | None = Field(default=None, description="Not supported; leave it out.")
    client_metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
    include: list[str] | None = Field(default=None, description="Ignored.")
    max_tool_calls: int | None = Field(default=None, description="Ignored: it applies to built-in tools only.")
    service_tier: str | None = Field(default=None, description="The priority of the request, as in chat completions.")
    safety_identifier: Annotated[str, Field(max_length=64)] | None = None
    prompt_cache_key: str | None = Field(
        default=None, description="A key for requests that share a prefix, as in chat completions."
    )
    prompt_cache_retention: str | None = Field(default=None, description="Ignored.")
    stream_options: dict[str, Any] | None = Field(default=None, description="Ignored.")

    @property
    def conversation_id(self) -> str | None:
        """Return the id of the conversation that the request names, or None."""
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation
