"""The OpenAPI document. Endpoints read bodies and write answers themselves, so FastAPI is told their schemas here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def request_body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """openapi_extra of a route whose JSON body is `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def route_docs(
    summary: str,
    answer: type[BaseModel],
    *,
    tag: str,
    errors: type[BaseModel],
    body: type[BaseModel] | None = None,
    path: Mapping[str, str] = MappingProxyType({}),
    query: Mapping[str, tuple[dict[str, Any], str]] = MappingProxyType({}),
    streams: bool = False,
) -> dict[str, Any]:
    """Return the arguments that document a route.

    Args:
        summary: The operation in a few words.
        answer: The model of the answer.
        tag: The group of operations.
        errors: The model of an error.
        body: The model of the request's body.
        path: Descriptions of the path's parameters, by name.
        query: Schema and description of the query's parameters, by name.
        streams: True if the answer may be a stream of events.
    """
    placed = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": text}
        for name, text in path.items()
    ]
    placed += [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in query.items()
    ]
    found: dict[int | str, dict[str, Any]] = {200: {"model": answer, "description": (answer.__doc__ or "").strip()}}
    if streams:
        found[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    found["4XX"] = {"model": errors, "description": "The request is refused."}
    found["5XX"] = {"model": errors, "description": "The request failed; x-should-retry says whether to try again."}
    extra = {**(request_body_schema(body) if body is not None else {}), **({"parameters": placed} if placed else {})}
    return {"summary": summary, "tags": [tag], "responses": found, "openapi_extra": extra}


def add_body_schemas(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Put the schemas of `models` into the document that `app` serves."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
            _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(schemas.get("$defs", {}))
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
