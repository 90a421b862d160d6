"""The routes of conversations, and of the chats that continue them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from llmops.cache import cache_dir
from llmops.gateway.api.conversation_chat import ConversationChatEndpoints, Price
from llmops.gateway.api.lazy_endpoint import LazyEndpoints
from llmops.gateway.conversations.chat_run import ChatRunRegistry
from llmops.gateway.conversations.purge import PurgeTask
from llmops.gateway.conversations.response_store import ResponseStore
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.openapi import route_docs
from llmops.gateway.schemas.conversation_requests import (
    BranchRequest,
    ConversationChatRequest,
    ConversationRequest,
    ItemsRequest,
)
from llmops.gateway.schemas.response_schemas import (
    ChatCompletion,
    ConversationItem,
    ConversationItems,
    ConversationList,
    ConversationObject,
    DeletedConversations,
    ErrorResponse,
    StoppedRunResponse,
)
from llmops.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from llmops.gateway.conversations.conversation_store import ConversationStore

BODIES: tuple[type[BaseModel], ...] = (ConversationRequest, ItemsRequest, BranchRequest, ConversationChatRequest)
_PATHS = {
    "conversation_id": "The conversation's id.",
    "item_id": "The item's id.",
    "run_id": "The answer's id.",
}
_TEXT: dict[str, Any] = {"type": "string"}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1}
_PAGE = {"limit": (_LIMIT, "Entries of the page."), "after": (_TEXT, "The last id of the page before.")}
_TENANT = {"tenant": (_TEXT, "Of all users of this tenant; needs the scope admin.")}


class ConversationRoutes:
    """Conversations of one gateway: their store, opened by its first use, and the answers in progress."""

    def __init__(self, settings: GatewaySettings, service: AppState, responses: ResponseStore, price: Price) -> None:
        self.runs = ChatRunRegistry()
        self._settings, self._service, self._responses = settings, service, responses
        self._store = LazyEndpoints(partial(_open_store, settings))
        self._chat = ConversationChatEndpoints(service, self.runs, self.store, price)
        self._endpoints = LazyEndpoints(self._make_endpoints)
        self._pruning = PurgeTask(self.store)

    async def store(self) -> ConversationStore:
        """Return the store of conversations. Raises NotFoundError if this gateway cannot have one."""
        found: ConversationStore = await self._store.get()
        return found

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Purge what is due while the gateway runs, and store unfinished answers when it ends."""
        if self._settings.store is not None or (cache_dir() / "store.db").exists():
            self._pruning.start()
        yield
        await self._pruning.close()
        await self.runs.close()
        if self._store.made is not None:
            await self._store.made.close()

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        late, chat, one = self._endpoints.endpoint, self._chat, "/api/conversations/{conversation_id}"
        add = partial(_add, app)
        add("POST", "/api/chat/completions", chat.create, "Answer in a conversation", ChatCompletion,
            body=ConversationChatRequest, streams=True)  # fmt: skip
        add("GET", "/api/chat/completions/{run_id}", chat.resume, "Read the rest of an answer", ChatCompletion,
            streams=True)  # fmt: skip
        add("DELETE", "/api/chat/completions/{run_id}", chat.stop, "Stop an answer", StoppedRunResponse)
        add("POST", "/api/conversations", late("create"), "Create a conversation", ConversationObject,
            body=ConversationRequest)  # fmt: skip
        searched = {**_PAGE, "q": (_TEXT, "Text that titles or messages contain.")}
        add("GET", "/api/conversations", late("list"), "List conversations", ConversationList, query=searched)
        add("DELETE", "/api/conversations", late("purge"), "Delete all conversations for good",
            DeletedConversations, query=_TENANT)  # fmt: skip
        add("GET", "/api/conversations/export", late("export"), "Export all conversations as JSON lines",
            None, query=_TENANT)  # fmt: skip
        add("GET", one, late("get"), "Get a conversation", ConversationObject)
        add("PATCH", one, late("change"), "Rename or change a conversation", ConversationObject,
            body=ConversationRequest)  # fmt: skip
        add("DELETE", one, late("delete"), "Delete a conversation", DeletedConversations)
        add("POST", f"{one}/branch", late("branch"), "Show another branch", ConversationObject, body=BranchRequest)
        add("GET", f"{one}/export", late("export"), "Export a conversation as a JSON line", None)
        self._add_openai(partial(add, tag="openai"))

    def _add_openai(self, add: Callable[..., None]) -> None:
        late, one = self._endpoints.endpoint, "/v1/conversations/{conversation_id}"
        add("POST", "/v1/conversations", late("openai_create"), "Create a conversation (OpenAI)", ConversationObject,
            body=ConversationRequest)  # fmt: skip
        add("GET", one, late("openai_get"), "Get a conversation (OpenAI)", ConversationObject)
        add("POST", one, late("openai_change"), "Change a conversation's metadata", ConversationObject,
            body=ConversationRequest)  # fmt: skip
        add("DELETE", one, late("delete"), "Delete a conversation (OpenAI)", DeletedConversations)
        add("POST", f"{one}/items", late("openai_add_items"), "Add items", ConversationItems, body=ItemsRequest)
        listed = {**_PAGE, "order": ({"enum": ["asc", "desc"]}, "By default the newest first.")}
        add("GET", f"{one}/items", late("openai_items"), "List a conversation's items", ConversationItems,
            query=listed)  # fmt: skip
        item = f"{one}/items/{{item_id}}"
        add("GET", item, late("openai_item"), "Get an item", ConversationItem)
        add("DELETE", item, late("openai_delete_item"), "Delete an item", ConversationObject)

    def _make_endpoints(self) -> object:
        from llmops.gateway.api.conversations import ConversationEndpoints

        if self._store.made is None:
            self._store.made = _open_store(self._settings)
        return ConversationEndpoints(self._store.made, self._responses, self._service.intake)


def _open_store(settings: GatewaySettings) -> ConversationStore:
    from llmops.gateway.conversations.conversation_store import ConversationStore

    # a machine without another store has one in its cache folder, as `llmops key` does
    url = settings.store or f"sqlite:///{cache_dir() / 'store.db'}"
    return ConversationStore(url, settings.conversations)


def _add(
    app: FastAPI,
    method: str,
    path: str,
    handle: Callable[..., Any],
    summary: str,
    answer: type[BaseModel] | None,
    *,
    tag: str = "conversations",
    **details: Any,
) -> None:
    names = {name: text for name, text in _PATHS.items() if f"{{{name}}}" in path}
    shown = route_docs(summary, answer or ErrorResponse, tag=tag, errors=ErrorResponse, path=names, **details)
    if answer is None:
        shown["response_class"] = StreamingResponse
        shown["responses"][200] = {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
    app.add_api_route(path, handle, methods=[method], response_model=None, **shown)
