"""The OpenAPI document. Endpoints read their bodies themselves, so FastAPI has to be told their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """openapi_extra of a route whose JSON body is `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_bodies(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
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
