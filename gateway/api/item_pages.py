"""Pages of items of conversations and responses, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmops.gateway.api.generation_response import page_limit
from llmops.gateway.errors import InvalidRequestError

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 20, 100
#: Query parameters of a list of items: the schema and description of each, for the OpenAPI
#: document.
ITEM_PAGE_PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE}, "Maximum number of entries to return."),
    "after": ({"type": "string"}, "The id of the previous page's last entry."),
    "order": ({"enum": ["asc", "desc"]}, "The order of entries: desc (newest first) by default."),
}


def item_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that the query asks for.

    Args:
        items: All items, the oldest first.
        query: The query parameters `limit`, `after` and `order`.

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
            raise InvalidRequestError(
                f"after must be the id of an item in this list; '{after[:40]}' is not.", param="after"
            )
        items = items[known.index(after) + 1 :]
    return item_list(items[:limit], len(items) > limit)


def item_list(items: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    """Return the list object of a page. `more` is True if another page follows."""
    ids = [item["id"] for item in items] or [None]
    data = [shown_item(item) for item in items]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def shown_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item with all fields of OpenAI's format, also those that clients may leave out."""
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
