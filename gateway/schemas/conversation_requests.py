"""The models of bodies of the conversations APIs.

The APIs are OpenAI's under /v1/conversations and the chat page's under /api.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from llmops.gateway.schemas.chat_request import ChatRequest, RequestMessage
from llmops.gateway.schemas.request_fields import Metadata, RequestModel

Items = Annotated[list[dict[str, Any]], Field(max_length=20)]
#: Maximum length of a system prompt, in characters. System prompts of coding agents have about
#: 100,000.
MAX_SYSTEM_PROMPT = 400_000
Title = Annotated[str, Field(max_length=500)]


class ConversationRequest(RequestModel):
    """The fields of a new or changed conversation. OpenAI's clients send `items` and `metadata`."""

    items: Items | None = Field(default=None, description="The first items of the conversation, at most 20.")
    metadata: Metadata | None = None
    title: Title | None = Field(default=None, description="The title; by default the beginning of the first message.")
    model: Annotated[str, Field(max_length=50)] | None = None
    system_prompt: Annotated[str, Field(max_length=MAX_SYSTEM_PROMPT)] | None = Field(
        default=None, description="The system prompt of all requests in the conversation."
    )


class PageConversationRequest(ConversationRequest):
    """The fields of a conversation in the chat page's API, which rejects unknown fields."""

    model_config = ConfigDict(extra="forbid")


class ItemsRequest(RequestModel):
    """A request to add up to 20 items to a conversation."""

    items: Items


class BranchRequest(RequestModel):
    """A request to show the branch that contains a message."""

    model_config = ConfigDict(extra="forbid")

    message_id: str


class ConversationChatRequest(ChatRequest):
    """A chat completion request that can continue a stored conversation.

    With `conversation_id`, `messages` contains only the new messages.
    """

    messages: list[RequestMessage] = Field(default_factory=list)
    conversation_id: Annotated[str, Field(max_length=64)] | None = None
    after: Annotated[str, Field(max_length=128)] | None = Field(
        default=None,
        description="The id of the message that the new messages follow; an edit or a second answer becomes a branch. "
        "Empty for the beginning; by default the last message of the visible branch.",
    )
