"""Bodies of the conversations APIs: OpenAI's under /v1/conversations, the chat page's under /api."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from llmops.gateway.schemas.chat_request import ChatRequest, RequestMessage
from llmops.gateway.schemas.request_fields import Metadata, RequestModel

Items = Annotated[list[dict[str, Any]], Field(max_length=20)]
#: Characters of a system prompt. Those of coding agents have about 100,000.
MAX_SYSTEM_PROMPT = 400_000
Title = Annotated[str, Field(max_length=500)]


class ConversationRequest(RequestModel):
    """The fields of a new or changed conversation. OpenAI's clients send `items` and `metadata`."""

    items: Items | None = Field(default=None, description="Items that the conversation begins with, at most 20.")
    metadata: Metadata | None = None
    title: Title | None = Field(default=None, description="By default the beginning of the first message.")
    model: Annotated[str, Field(max_length=50)] | None = None
    system_prompt: Annotated[str, Field(max_length=MAX_SYSTEM_PROMPT)] | None = Field(
        default=None, description="Stands before every request of the conversation."
    )


class PageConversationRequest(ConversationRequest):
    """The request of the chat page's API, where an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class ItemsRequest(RequestModel):
    """Items to add to a conversation, at most 20."""

    items: Items


class BranchRequest(RequestModel):
    """The request to show the branch of a message."""

    model_config = ConfigDict(extra="forbid")

    message_id: str


class ConversationChatRequest(ChatRequest):
    """A chat completion request that may continue a stored conversation.

    `messages` are the new ones then.
    """

    messages: list[RequestMessage] = Field(default_factory=list)
    conversation_id: Annotated[str, Field(max_length=64)] | None = None
    after: Annotated[str, Field(max_length=128)] | None = Field(
        default=None,
        description="The id of the message that the new ones follow: an edit or a second answer becomes a branch. "
        "Empty for the beginning; by default the last message of the branch that is shown.",
    )
