"""The operations over HTTP. A key is needed even where the gateway asks nobody for one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.admin.handlers import HANDLERS
from llmops.control.admin.operations import OPERATIONS, Operation
from llmops.control.errors import as_api_error
from llmops.control.openapi_parameters import make_parameters
from llmops.control.request_parsing import parse_query, read_json_object
from llmops.control.shared_store import SharedStore
from llmops.errors import LlmopsError
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.http.openapi import request_body_schema
from llmops.gateway.http.request_body import validate_body
from llmops.gateway.http.request_context import context_of
from llmops.gateway.interfaces import Caller
from llmops.store.audit import AuditContext

CREATED = frozenset({"create_tenant", "create_key", "set_price"})


def add_admin(app: FastAPI, store: SharedStore) -> None:
    for operation in OPERATIONS:
        app.add_api_route(
            operation.path,
            _Endpoint(operation, store).handle,
            methods=[operation.method],
            name=operation.name,
            operation_id=operation.name,
            summary=operation.summary,
            tags=["admin"],
            status_code=201 if operation.name in CREATED else 200,
            responses={201 if operation.name in CREATED else 200: {"model": operation.told}},
            openapi_extra=_openapi_extra(operation),
        )


class _Endpoint:
    """One operation: who asks, what for, done in one transaction."""

    def __init__(self, operation: Operation[Any, Any], store: SharedStore) -> None:
        self._operation, self._store, self._work = operation, store, HANDLERS[operation.name]

    async def handle(self, request: Request) -> Response:
        operation = self._operation
        caller = context_of(request).caller
        _require_admin(caller)
        asked = validate_body(operation.asked, {**await self._fields(request), **request.path_params})
        by = AuditContext(_actor(caller), datetime.now(UTC))
        async with self._store.write() if operation.writes else self._store.read() as connection:
            try:
                told = await self._work(connection, by, asked)
            except LlmopsError as error:
                raise as_api_error(error) from error
        status = 201 if operation.name in CREATED else 200
        return Response(json.dumps(_data(told), ensure_ascii=False), status, media_type="application/json")

    async def _fields(self, request: Request) -> dict[str, Any]:
        if self._operation.has_body:
            return await read_json_object(request)
        return parse_query(request, self._operation.asked)


def _require_admin(caller: Caller) -> None:
    """Raises ForbiddenError, also where nobody is asked for a key: any page that a browser shows could ask there."""
    if "admin" not in caller.scopes:
        raise ForbiddenError(
            "Administration wants a key with the scope 'admin'; `llmops key create --scopes admin` on a store makes it."
        )


def _actor(caller: Caller) -> str:
    return f"key:{caller.key_id}" if caller.key_id else f"user:{caller.user_id}"


def _data(told: Any) -> Any:
    return [one.data() for one in told] if isinstance(told, tuple) else told.data()


def _openapi_extra(operation: Operation[Any, Any]) -> dict[str, Any]:
    parameters = {"parameters": make_parameters(operation.asked, operation.placed, not operation.has_body)}
    return parameters | (request_body_schema(operation.asked) if operation.has_body else {})
