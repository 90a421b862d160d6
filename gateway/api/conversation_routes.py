"""The routes of conversations, and of the chats that continue them.

The first request creates the endpoints, because they need SQLAlchemy, an optional dependency that
costs memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmops.cache import cached_store
from llmops.distribution import install_command
from llmops.gateway.api.conversation_chat import ConversationChatEndpoints
from llmops.gateway.api.item_pages import ITEM_PAGE_PARAMETERS
from llmops.gateway.api.resumable_chats import Price, ResumableChats
from llmops.gateway.conversations.chat_run import ChatRunRegistry
from llmops.gateway.conversations.purge import PurgeTask
from llmops.gateway.conversations.response_store import ResponseStore
from llmops.gateway.errors import NotFoundError
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.middleware import Check, Endpoint, GatewayApp
from llmops.gateway.http.openapi import ErrorResponse, ResponseModel, route_docs
from llmops.gateway.schemas.conversation_requests import (
    BranchRequest,
    ConversationChatRequest,
    ConversationRequest,
    ItemsRequest,
    PageConversationRequest,
)
from llmops.gateway.schemas.response_schemas import (
    ChatCompletion,
    ConversationItem,
    ConversationList,
    ConversationObject,
    DeletedConversations,
    ItemList,
    StoppedRunResponse,
)
from llmops.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from llmops.gateway.api.conversations import ConversationEndpoints
    from llmops.gateway.conversations.checkpoints import CheckpointStore
    from llmops.gateway.conversations.conversation_store import ConversationStore
    from llmops.gateway.conversations.title_writer import TitleWriter

_PATHS = {
    "conversation_id": "The conversation's id.",
    "item_id": "The item's id.",
    "run_id": "The answer's id.",
}
_TEXT: dict[str, Any] = {"type": "string"}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1}
_PAGE = {
    "limit": (_LIMIT, "Maximum number of entries to return."),
    "after": (_TEXT, "The id of the previous page's last entry."),
}
_SEARCH = {**_PAGE, "q": (_TEXT, "Text to find in titles and messages.")}
_SUBJECT = {
    "tenant": (_TEXT, "Select the data of all users of this tenant; needs the scope admin."),
    "user": (_TEXT, "Select the data of the user with this id; needs the scope admin."),
}


class ConversationRoutes:
    """The conversations of a gateway: their routes, their store, and the answers in progress.

    Attributes:
        chats: The answers in progress that clients can resume.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        service: AppState,
        responses: ResponseStore,
        price: Price,
        checkpoints: CheckpointStore | None = None,
        checks: Sequence[Check] = (),
    ) -> None:
        """Create the routes.

        Args:
            settings: The gateway's settings.
            service: The gateway's shared state.
            responses: The store of responses.
            price: Returns the price of a request's usage at a time.
            checkpoints: The state of answers that gateways share. None without Redis.
            checks: The checks to run for answers that are taken over from a lost gateway, and for
                requests that write titles.

        Raises:
            LlmopsError: The cache folder, or the store in it, cannot be used.
        """
        if settings.store is None:
            cached_store()  # Fails here, before the gateway listens.
        self._settings, self._service, self._responses, self._checkpoints = settings, service, responses, checkpoints
        self.chats = ResumableChats(
            service, ChatRunRegistry(), self.store, responses, price, checkpoints, settings.conversations.stores, checks
        )
        self._checks = checks
        self._titles: TitleWriter | None = None
        titles = self._title_writer if settings.conversations.title_model else None
        self._chat = ConversationChatEndpoints(service, self.chats, self.store, titles)
        self._lock = asyncio.Lock()
        self._store: ConversationStore | None = None
        self._endpoints: ConversationEndpoints | None = None
        self._purging = PurgeTask(self.store, settings.conversations.archive)

    async def store(self) -> ConversationStore:
        """Return the store of conversations, which the first call opens.

        Raises:
            NotFoundError: A library that the store needs is not installed.
        """
        async with self._lock:
            if self._store is None:
                try:
                    self._store = await asyncio.to_thread(_open_store, self._settings)
                except ModuleNotFoundError as error:
                    raise NotFoundError(
                        f"This gateway keeps no conversations: {error.name} is not installed. Its operator can install "
                        f"the extra `store`: {install_command('store')}",
                        code="conversations_not_stored",
                    ) from error
            return self._store

    def _title_writer(self) -> TitleWriter:
        if self._titles is None:
            from llmops.gateway.conversations.title_writer import TitleWriter

            self._titles = TitleWriter(self._service, self._settings.conversations.title_model or "", self._checks)
        return self._titles

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Run the background tasks of conversations while the gateway runs.

        The tasks purge deleted conversations and continue answers of lost gateways. When the
        gateway shuts down, its unfinished answers are left to other gateways, or stored as they
        are.
        """
        if self._settings.store is not None or cached_store().exists():
            self._purging.start()
        if self._checkpoints is not None:
            await self._checkpoints.start(self.chats.adopt)
        yield
        await self._purging.close()
        await self.chats.close()
        if self._titles is not None:
            await self._titles.close()
        if self._checkpoints is not None:
            await self._checkpoints.close()
        if self._store is not None:
            await self._store.close()

    def add_routes(self, app: GatewayApp) -> None:
        """Add the routes to `app`."""
        add = partial(_add, app)
        one = "/api/chat/completions/{run_id}"
        add("POST", "/api/chat/completions", self._chat.create, "Answer in a conversation", ChatCompletion,
            body=ConversationChatRequest)  # fmt: skip
        add("GET", one, self.chats.resume, "Read the rest of an answer", ChatCompletion, streams=True)
        add("DELETE", one, self.chats.stop, "Stop an answer", StoppedRunResponse)
        self._add_page_routes(add)
        self._add_openai_routes(partial(add, tag="openai"))

    def _add_page_routes(self, add: Callable[..., None]) -> None:
        lazy, every, one = self._lazy, "/api/conversations", "/api/conversations/{conversation_id}"
        change = {"body": PageConversationRequest}
        add("POST", every, lazy("create"), "Create a conversation", ConversationObject, **change)
        add("GET", every, lazy("list"), "List conversations", ConversationList, query_parameters=_SEARCH)
        add(
            "DELETE",
            every,
            lazy("purge"),
            "Delete all conversations permanently",
            DeletedConversations,
            query_parameters=_SUBJECT,
        )
        add(
            "GET",
            f"{every}/export",
            lazy("export"),
            "Export all conversations as JSON lines",
            None,
            query_parameters=_SUBJECT,
        )
        add("GET", one, lazy("get"), "Get a conversation", ConversationObject)
        add("PATCH", one, lazy("change"), "Rename or change a conversation", ConversationObject, **change)
        add("DELETE", one, lazy("delete"), "Delete a conversation", DeletedConversations)
        add("POST", f"{one}/branch", lazy("branch"), "Show another branch", ConversationObject, body=BranchRequest)

    def _add_openai_routes(self, add: Callable[..., None]) -> None:
        lazy, one = self._lazy, "/v1/conversations/{conversation_id}"
        add("POST", "/v1/conversations", lazy("openai_create"), "Create a conversation (OpenAI)", ConversationObject,
            body=ConversationRequest)  # fmt: skip
        add("GET", one, lazy("openai_get"), "Get a conversation (OpenAI)", ConversationObject)
        add("POST", one, lazy("openai_change"), "Change a conversation's metadata", ConversationObject,
            body=ConversationRequest)  # fmt: skip
        add("DELETE", one, lazy("delete"), "Delete a conversation (OpenAI)", DeletedConversations)
        add("POST", f"{one}/items", lazy("openai_add_items"), "Add items", ItemList, body=ItemsRequest)
        add("GET", f"{one}/items", lazy("openai_items"), "List a conversation's items", ItemList,
            query_parameters=ITEM_PAGE_PARAMETERS)  # fmt: skip
        item = f"{one}/items/{{item_id}}"
        add("GET", item, lazy("openai_item"), "Get an item", ConversationItem)
        add("DELETE", item, lazy("openai_delete_item"), "Delete an item", ConversationObject)

    def _lazy(self, name: str) -> Endpoint:
        """Return an endpoint that calls the method `name` of the conversation endpoints."""

        async def endpoint(request: Request) -> Response:
            store = await self.store()
            if self._endpoints is None:
                from llmops.gateway.api.conversations import ConversationEndpoints

                self._endpoints = ConversationEndpoints(store, self._responses, self._service.intake)
            response: Awaitable[Response] = getattr(self._endpoints, name)(request)
            return await response

        return endpoint


def _open_store(settings: GatewaySettings) -> ConversationStore:
    # The endpoints' module is imported in the thread that opens the store, because the import would
    # block the event loop.
    import llmops.gateway.api.conversations  # noqa: F401
    from llmops.gateway.conversations.conversation_store import ConversationStore

    # Without a store setting, the store is a file in the cache directory, as for `llmops key`.
    url = settings.store or f"sqlite:///{cached_store()}"
    return ConversationStore(url, settings.conversations)


def _add(
    app: GatewayApp,
    method: str,
    path: str,
    endpoint: Endpoint,
    summary: str,
    response: type[ResponseModel] | None,
    *,
    tag: str = "conversations",
    **docs: Any,
) -> None:
    """Add a route to `app`. A route without `response` responds with JSON lines."""
    names = {name: text for name, text in _PATHS.items() if f"{{{name}}}" in path}
    if response is not None:
        app.add_endpoint(method, path, endpoint, summary, response, tag=tag, path_parameters=names, **docs)
        return
    described = route_docs(summary, ErrorResponse, tag=tag, path_parameters=names, **docs)
    described["responses"][200] = {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
    app.add_api_route(
        path, endpoint, methods=[method], response_model=None, response_class=StreamingResponse, **described
    )
