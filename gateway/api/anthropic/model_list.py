"""The list of models in Anthropic's form, for its SDK's `models.list()` and `models.retrieve()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from llmops.gateway.errors import InvalidRequestError

_DEFAULT, _MOST = 20, 1000


def anthropic_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """One of OpenAI's model objects, as GET /v1/models has them, in Anthropic's terms."""
    length = model.get("max_model_len")
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def model_page(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page that `limit` and `after_id` or `before_id` ask for."""
    ids = [model["id"] for model in models]
    limit = _limit(query.get("limit"))
    if "before_id" in query:
        end = _place(ids, query["before_id"], "before_id")
        start = max(end - limit, 0)
        more = start > 0
    else:
        start = _place(ids, query["after_id"], "after_id") + 1 if "after_id" in query else 0
        end = min(start + limit, len(ids))
        more = end < len(ids)
    shown = ids[start:end]
    return {
        "data": [anthropic_model(model) for model in models[start:end]],
        "has_more": more,
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _limit(given: str | None) -> int:
    if given is None:
        return _DEFAULT
    if not given.isdecimal() or not 1 <= int(given[:5]) <= _MOST:
        raise InvalidRequestError(f"limit must be a number from 1 to {_MOST}.", param="limit")
    return int(given[:5])


def _place(ids: Sequence[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise InvalidRequestError(f"{param} names a model that is not in the list.", param=param)
    return ids.index(wanted)
