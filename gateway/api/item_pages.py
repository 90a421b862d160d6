"""Items of conversations and responses as OpenAI lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmops.gateway.api.generation_response import page_limit
from llmops.gateway.errors import InvalidRequestError

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 20, 100
#: Query parameters of a list of items, with their schemas, for the OpenAPI document.
ITEM_PAGE_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE}, "Entries of the page."),
    "after": ({"type": "string"}, "The last id of the page before."),
    "order": ({"enum": ["asc", "desc"]}, "By default the newest first."),
}


def item_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of `items`, the oldest first, that the query asks for.

    Raises:
        InvalidRequestError: `order` or `limit` is invalid, or no item has the id `after`.
    """
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc.", param="order", code="invalid_value")
    limit = page_limit(query, DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    items = items[::-1] if order == "desc" else items
    if after is not None:
        known = [item["id"] for item in items]
        if after not in known:
            raise InvalidRequestError(f"There is no item '{after[:40]}' here.", param="after")
        items = items[known.index(after) + 1 :]
    return item_list(items[:limit], len(items) > limit)


def item_list(items: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """Return the list object of a page. `more` tells that another page follows."""
    ids = [item["id"] for item in items] or [None]
    data = [shown_item(item) for item in items]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def shown_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item in OpenAI's full form, with the fields that clients may leave out."""
    shown = {"type": "message", "status": "completed", **item}
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text" if item.get("role") == "assistant" else "input_text", "text": content}]
    if isinstance(content, list):
        shown["content"] = [
            {"annotations": [], **part} if isinstance(part, dict) and part.get("type") == "output_text" else part
            for part in content
        ]
    return shown
