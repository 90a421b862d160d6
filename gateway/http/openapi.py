"""Schemas and descriptions of endpoints for the OpenAPI document.

FastAPI cannot derive the schemas, because endpoints read bodies and write responses themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


class ResponseModel(BaseModel):
    """A base of response models. A response may have more fields than its model."""

    model_config = ConfigDict(extra="allow")


class ErrorObject(ResponseModel):
    """An error: a message that says what happened and what to do, and the parameter at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """The body of an error response, in OpenAI's format."""

    error: ErrorObject


def request_body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose JSON body is a `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def route_docs(
    summary: str,
    response: type[BaseModel],
    *,
    tag: str = "openai",
    errors: type[BaseModel] = ErrorResponse,
    body: type[BaseModel] | None = None,
    path_parameters: Mapping[str, str] = MappingProxyType({}),
    query_parameters: Mapping[str, tuple[dict[str, Any], str]] = MappingProxyType({}),
    streams: bool | None = None,
) -> dict[str, Any]:
    """Return the arguments of FastAPI that document a route.

    Args:
        summary: The operation in a few words.
        response: The model of the response.
        tag: The group of operations that the route belongs to.
        errors: The model of an error response.
        body: The model of the request's body.
        path_parameters: The description of each path parameter, by name.
        query_parameters: The schema and description of each query parameter, by name.
        streams: True if the response may be an event stream. By default, True if the body has a
            field `stream`.
    """
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": text}
        for name, text in path_parameters.items()
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in query_parameters.items()
    ]
    responses: dict[int | str, dict[str, Any]] = {
        200: {"model": response, "description": (response.__doc__ or "").strip()},
        "4XX": {"model": errors, "description": "The request was rejected; the error says why."},
        "5XX": {"model": errors, "description": "The request failed; x-should-retry says whether to try again."},
    }
    if streams or (streams is None and body is not None and "stream" in body.model_fields):
        responses[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    extra = request_body_schema(body) if body is not None else {}
    if parameters:
        extra["parameters"] = parameters
    return {"summary": summary, "tags": [tag], "responses": responses, "openapi_extra": extra}


def add_body_schemas(document: dict[str, Any], models: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of `models`, which are models of bodies, to an OpenAPI document."""
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas.get("$defs", {}))
