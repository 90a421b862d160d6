"""The models of responses in the formats of OpenAI, vLLM and Cohere, for the API reference.

Endpoints write plain JSON and do not use these models. A test validates the responses against the
models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from llmops.gateway.http.openapi import ResponseModel


class ModerationResult(ResponseModel):
    """The verdict of the safety filters on one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class ModerationResponse(ResponseModel):
    """The verdicts of the safety filters, one per text."""

    id: str
    model: str
    results: list[ModerationResult]


class UsageCounts(ResponseModel):
    """The token counts of a request and its answer."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class ChatMessage(ResponseModel):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None


class ChatChoice(ResponseModel):
    """One of the `n` answers to a request."""

    index: int
    message: ChatMessage
    finish_reason: str | None


class ChatCompletion(ResponseModel):
    """A chat completion.

    With `stream`, the completion is sent as chunks: server-sent events that end with `data:
    [DONE]`.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts


class TextChoice(ResponseModel):
    """One of the `n` texts for a prompt."""

    index: int
    text: str
    finish_reason: str | None


class Completion(ResponseModel):
    """A text completion.

    With `stream`, the completion is sent as chunks: server-sent events that end with `data:
    [DONE]`.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageCounts


class EmbeddingEntry(ResponseModel):
    """The vector of one input, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    """The vectors of all inputs, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingEntry]
    model: str
    usage: UsageCounts


class RerankResult(ResponseModel):
    """A document's index in the request, and its relevance to the query."""

    index: int
    relevance_score: float


class RerankResponse(ResponseModel):
    """The documents, ordered by relevance, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: UsageCounts


class ResponseObject(ResponseModel):
    """A response. With `stream`, it is sent as typed server-sent events with sequence numbers."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: dict[str, Any] | None


class DeletedResponse(ResponseModel):
    """The confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokenCount(ResponseModel):
    """The number of tokens in a response's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(ResponseModel):
    """A page of the items of a response's input or of a conversation, the newest first by default."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelEntry(ResponseModel):
    """A model. Requests with the header `anthropic-version` receive Anthropic's format instead."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    ready: bool
    max_model_len: int | None = Field(
        default=None, description="The maximum number of tokens in prompt and answer together."
    )


class ModelEntries(ResponseModel):
    """The models that the caller may use."""

    object: Literal["list"]
    data: list[ModelEntry]


class TokenizeResponse(ResponseModel):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    """The text of token ids."""

    prompt: str


class HealthResponse(ResponseModel):
    """The state of the gateway. Callers with a key also receive the state of each model."""

    status: Literal["live", "ready", "degraded"]
    models: dict[str, Any] | None = None


class ListedConversation(ResponseModel):
    """An entry in the list of conversations."""

    id: str
    object: Literal["conversation"]
    created_at: float


class ConversationObject(ListedConversation):
    """A stored conversation.

    Under /api, a conversation also has a title, a model and a system prompt. GET of a single
    conversation adds its messages.
    """

    metadata: dict[str, str]


class ConversationList(ResponseModel):
    """A page of conversations, the most recently changed first."""

    object: Literal["list"]
    data: list[ListedConversation]
    has_more: bool


class DeletedConversations(ResponseModel):
    """The confirmation that one or several conversations were deleted."""

    object: Literal["conversation.deleted", "conversations.deleted"]
    deleted: bool | int


class ConversationItem(ResponseModel):
    """An item of a conversation."""

    id: str
    type: str


class StoppedRunResponse(ResponseModel):
    """The state of an answer after a request stopped it."""

    id: str
    status: str
    saved: bool
