"""The endpoints of stored conversations, /v1/conversations and /api/conversations.

/v1/conversations is OpenAI's API and /api/conversations serves the chat page. Both read and write
the same rows. The first request imports the module, because SQLAlchemy is an optional dependency.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, MutableSequence, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llmops.gateway.api.generation_response import json_bytes, json_response, page_limit
from llmops.gateway.api.item_pages import item_list, item_page, shown_item
from llmops.gateway.conversations.conversation_json import (
    conversation_object,
    conversation_summary,
    export_line,
    unix_seconds,
)
from llmops.gateway.conversations.conversation_store import (
    COPIES,
    MESSAGE_BYTES,
    Branch,
    ConversationStore,
    message_from_item,
    message_items,
    public_id,
)
from llmops.gateway.conversations.event_replay import render_in_turn
from llmops.gateway.conversations.items import parse_input_items, to_messages
from llmops.gateway.conversations.response_store import ResponseStore, StoredResponse, ensure_item_id
from llmops.gateway.errors import ApiError, ForbiddenError, InvalidRequestError
from llmops.gateway.http.request_body import BodyReader
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.gateway.logging_setup import request_logger
from llmops.gateway.schemas.conversation_requests import (
    BranchRequest,
    ConversationRequest,
    ItemsRequest,
    PageConversationRequest,
)
from llmops.input_files import MALFORMED
from llmops.store.columns import canonical_uuid
from llmops.store.conversations import Conversation, NewMessage

log = request_logger(__name__)

#: Number of conversations on a page of the list, by default and at most. Entries have no messages,
#: so a large page is still a small response.
DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 1000
#: Maximum length of a search text, in characters; the rest is ignored. Bounds the work of the
#: database; 200 characters identify a text.
MAX_SEARCH_CHARACTERS = 200
#: Size of the parts in which an export is sent, in bytes. What sends a part keeps it until the next.
EXPORT_PIECE = 64 * 1024
_TENANT = re.compile(r"[\w.-]+")


class ConversationEndpoints:
    """The endpoints of stored conversations.

    Methods whose names begin with `openai_` use OpenAI's format.
    """

    def __init__(self, store: ConversationStore, responses: ResponseStore, intake: BodyReader) -> None:
        self._store, self._responses, self._intake = store, responses, intake

    async def create(self, request: Request) -> Response:
        """Create a conversation."""
        return json_response(conversation_summary(await self._created(request, PageConversationRequest)))

    async def list(self, request: Request) -> Response:
        """Return a page of the caller's conversations, the most recently changed first.

        The query parameter `q` selects conversations whose title or messages contain a text.
        """
        query, caller = request.query_params, _caller(request)
        limit = page_limit(query, DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        text = (query.get("q") or "").replace("\0", "")[:MAX_SEARCH_CHARACTERS]
        page: dict[str, Any] = {"limit": limit, "after": query.get("after"), "text": text}
        try:
            return _list_response(*await self._store.list(caller, **page))
        except MALFORMED:
            return _list_response(*await self._store.list_readable(caller, lambda one: _list_response([one]), **page))

    async def get(self, request: Request) -> Response:
        """Return a conversation with its messages."""
        branch = await self._read(request)
        return await _rendered(request, lambda: conversation_object(branch))

    async def change(self, request: Request) -> Response:
        """Change the title, model, system prompt or metadata of a conversation."""
        return json_response(conversation_summary(await self._changed(request, PageConversationRequest)))

    async def delete(self, request: Request) -> Response:
        """Delete a conversation."""
        await self._store.delete(_caller(request), _id(request))
        return json_response({"id": _id(request), "object": "conversation.deleted", "deleted": True})

    async def branch(self, request: Request) -> Response:
        """Make the branch that contains a message the visible branch of its conversation."""
        body = await self._intake.load(BranchRequest, request)
        await self._store.show_branch(_caller(request), _id(request), body.message_id)
        return await self.get(request)

    async def export(self, request: Request) -> Response:
        """Return all stored data of the caller as JSON lines.

        A caller with the scope admin may export the data of a `tenant` or a `user`. If the store
        fails, the last line has the error.
        """
        tenant, user = _subject(request)
        context = context_of(request)
        damaged: list[str] = []

        def hold(size: int) -> None:
            # An export has one entry in memory at a time, so it holds as much as its largest entry.
            if size > context.buffered_bytes:
                self._intake.hold(size - context.buffered_bytes, context)

        branches = self._store.everything(context.caller, damaged, tenant, user)
        responses = self._stored_responses(user or context.caller.owner, tenant or "", damaged, hold)
        lines = _lines(branches, responses, damaged, hold)
        # Read before the response begins, so that a refusal has an HTTP status.
        first = [await anext(lines, b"")]

        async def body() -> AsyncIterator[bytes]:
            line = first.pop()
            try:
                while line:
                    for at in range(0, len(line), EXPORT_PIECE):
                        yield line[at : at + EXPORT_PIECE]
                    del line  # Otherwise, a read that is cancelled keeps it until a full collection.
                    line = await anext(lines, b"")
            except ApiError as error:
                # The body gets no end, which clients may not notice.
                yield error.body_json() + b"\n"
                raise

        headers = {"content-disposition": f'attachment; filename="{tenant or user or "conversations"}.jsonl"'}
        return StreamingResponse(body(), media_type="application/x-ndjson", headers=headers)

    async def purge(self, request: Request) -> Response:
        """Delete all data of the caller permanently.

        With the scope admin, the query parameter `tenant` or `user` deletes the data of that tenant
        or user instead.
        """
        caller, (tenant, user) = _caller(request), _subject(request)
        purged = await self._store.purge(caller, tenant, user)
        await self._responses.delete_all(user or caller.owner, tenant or "")
        return json_response({"object": "conversations.deleted", "deleted": purged})

    async def openai_create(self, request: Request) -> Response:
        """Create a conversation, in OpenAI's format."""
        return json_response(_openai(await self._created(request, ConversationRequest)))

    async def openai_get(self, request: Request) -> Response:
        """Return a conversation, in OpenAI's format."""
        return json_response(_openai(await self._store.find(_caller(request), _id(request))))

    async def openai_change(self, request: Request) -> Response:
        """Change the metadata of a conversation, in OpenAI's format."""
        return json_response(_openai(await self._changed(request, ConversationRequest)))

    async def openai_items(self, request: Request) -> Response:
        """Return a page of the items of a conversation."""
        branch = await self._read(request)
        return await _rendered(
            request,
            lambda: item_page(
                [item for message in branch.messages for item in message_items(message)], request.query_params
            ),
        )

    async def openai_item(self, request: Request) -> Response:
        """Return an item of a conversation."""
        item_id = request.path_params["item_id"]
        branch = await self._read(request, item_id)
        found = [item for item in message_items(branch.messages[-1]) if item["id"] == item_id]
        return json_response(shown_item(found[0]))

    async def openai_add_items(self, request: Request) -> Response:
        """Add items to a conversation."""
        body = await self._intake.load(ItemsRequest, request)
        new = _new_messages(body.items)
        stored = await self._store.append(_caller(request), _id(request), new)
        return json_response(item_list([item for message in stored for item in message_items(message)], False))

    async def openai_delete_item(self, request: Request) -> Response:
        """Delete an item and return its conversation."""
        kept = await self._store.remove(_caller(request), _id(request), request.path_params["item_id"])
        return json_response(_openai(kept))

    async def _stored_responses(
        self, owner: str, tenant: str, damaged: MutableSequence[str], hold: Callable[[int], None]
    ) -> AsyncIterator[bytes]:
        for response_id, one in await self._responses.list(owner, tenant):
            try:
                row = await self._responses.find(response_id, one)
                if row is None:
                    continue
                line = _response_line(row.decoded())
            except MALFORMED:
                damaged.append(response_id)
                continue
            hold(COPIES * row.size)
            del row
            yield line
            del line

    async def _created(self, request: Request, model: type[ConversationRequest]) -> Conversation:
        body = await self._intake.load(model, request)
        return await self._store.create(
            _caller(request),
            _new_messages(body.items or []),
            title=body.title,
            model=body.model or "",
            system_prompt=body.system_prompt,
            metadata=body.metadata,
        )

    async def _changed(self, request: Request, model: type[ConversationRequest]) -> Conversation:
        body = await self._intake.load(model, request)
        if body.items:
            raise InvalidRequestError(
                "This request cannot add items; add them with POST /v1/conversations/{id}/items.", param="items"
            )
        values = body.model_dump(include={"title", "system_prompt"}, exclude_unset=True)
        if body.model is not None:
            values["model"] = body.model
        if body.metadata is not None:
            values["metadata"] = json.dumps(body.metadata)
        if not values:
            return await self._store.find(_caller(request), _id(request))
        return await self._store.change(_caller(request), _id(request), **values)

    async def _read(self, request: Request, after: str | None = None) -> Branch:
        """Return the part of a conversation that ends with the item `after`, or the visible branch.

        Raises:
            UnavailableError: The gateway holds too much data of requests in memory already.
        """
        context = context_of(request)
        return await self._store.read(
            context.caller, _id(request), after, hold=lambda size: self._intake.hold(size, context)
        )


async def _rendered(request: Request, render: Callable[[], dict[str, Any]]) -> Response:
    """Return what `render` makes of a whole conversation, in the turns of the caller."""
    content = await render_in_turn(_caller(request).share, lambda: json_bytes(render()))
    return Response(content, media_type="application/json")


def _list_response(conversations: Sequence[Conversation], more: bool = False) -> Response:
    return json_response({"object": "list", "data": [_listed(one) for one in conversations], "has_more": more})


def _listed(conversation: Conversation) -> dict[str, Any]:
    summary = conversation_summary(conversation)
    del summary["system_prompt"], summary["metadata"]
    return summary


def _openai(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": public_id(conversation),
        "object": "conversation",
        "created_at": int(unix_seconds(conversation.created_at)),
        "metadata": json.loads(conversation.metadata),
    }


def _new_messages(client_items: Sequence[dict[str, Any]]) -> list[NewMessage]:
    """Return a client's items as messages.

    Raises:
        InvalidRequestError: An item cannot be converted to a chat message.
    """
    items = [ensure_item_id(item, "items") for item in parse_input_items(client_items)]
    to_messages(items)
    return [message_from_item(item) for item in items]


async def _lines(
    branches: AsyncIterator[Branch],
    responses: AsyncIterator[bytes],
    damaged: list[str],
    hold: Callable[[int], None],
) -> AsyncIterator[bytes]:
    """Yield conversations as JSON lines, then stored responses with their input.

    Errors of `hold` are raised.

    Args:
        branches: The conversations.
        responses: The lines of the stored responses.
        damaged: Collects the ids of conversations and responses that cannot be decoded. The last
            lines name them.
        hold: Called with the bytes of memory that a line takes until the client has read it.
    """
    async for branch in branches:
        try:
            line = export_line(branch)
        except MALFORMED:
            damaged.append(public_id(branch.conversation))
            continue
        hold(COPIES * len(line) + MESSAGE_BYTES * len(branch.every))
        del branch  # The client may take long to read the line.
        yield line
        del line  # A read that is cancelled would keep it until a full collection.
    async for line in responses:
        yield line
        del line
    for one in damaged:
        log.error(
            "%s was left out of an export, because a row of it in the store is damaged; restore or delete it.", one
        )
        problem = "A row of this entry in the store is damaged; ask the gateway's operator."
        yield json_bytes({"id": one, "error": problem}) + b"\n"


def _response_line(stored: StoredResponse) -> bytes:
    return json_bytes({**stored.response, "input": stored.items}) + b"\n"


def _subject(request: Request) -> tuple[str | None, str | None]:
    """Return the tenant or the user that the query names, and None for the other.

    Both are None if the query asks for the caller's own data.

    Raises:
        ForbiddenError: The caller lacks the scope admin.
        InvalidRequestError: A name is malformed, or both a tenant and a user are requested.
    """
    tenant, user = request.query_params.get("tenant"), request.query_params.get("user")
    if tenant is None and user is None:
        return None, None
    if "admin" not in _caller(request).scopes:
        raise ForbiddenError("The data of a tenant or another user needs a key with the scope 'admin'. Use such a key.")
    if tenant is None and user is not None:
        with suppress(ValueError):
            return None, canonical_uuid(user)
    if user is None and _TENANT.fullmatch(tenant or ""):
        return tenant, None
    raise InvalidRequestError("The query must have either a tenant's name or a user's id, a UUID.", param="user")


def _caller(request: Request) -> Caller:
    return context_of(request).caller


def _id(request: Request) -> str:
    return str(request.path_params["conversation_id"])
