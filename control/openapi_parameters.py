"""Parameters of paths and queries, as the OpenAPI document has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel


def make_parameters(model: type[BaseModel], placed: Sequence[str], query: bool) -> list[dict[str, Any]]:
    """Of the fields of `model`: `placed` ones are in the path, the others, with `query`, in the query."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    needed = schema.get("required", ())
    found = []
    for name, field in schema["properties"].items():
        if name in placed:
            found.append({"name": name, "in": "path", "required": True, "schema": field})
        elif query:
            found.append({"name": name, "in": "query", "required": name in needed, "schema": field})
    return found


def get_route_options(asked: type[BaseModel], told: type[BaseModel]) -> dict[str, Any]:
    """Of a GET, for `add_api_route`."""
    return {"responses": {200: {"model": told}}, "openapi_extra": {"parameters": make_parameters(asked, (), True)}}
