"""The operations over HTTP. A key is needed even where the gateway asks nobody for one."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from llmops.control.admin.operations import OPERATIONS, Operation
from llmops.control.admin.work import WORK
from llmops.control.failures import refused
from llmops.control.reading import body_of_request, query_of
from llmops.control.schema import parameters_of
from llmops.control.shared import SharedStore
from llmops.errors import LlmopsError
from llmops.gateway.errors import ForbiddenError
from llmops.gateway.http.body import validate
from llmops.gateway.http.context import context_of
from llmops.gateway.http.openapi import body_of
from llmops.gateway.messages import Caller
from llmops.store.audit import By

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
            openapi_extra=_documented(operation),
        )


class _Endpoint:
    """One operation: who asks, what for, done in one transaction."""

    def __init__(self, operation: Operation[Any, Any], store: SharedStore) -> None:
        self._operation, self._store, self._work = operation, store, WORK[operation.name]

    async def handle(self, request: Request) -> Response:
        operation = self._operation
        caller = context_of(request).caller
        _refuse_others(caller)
        asked = validate(operation.asked, {**await self._fields(request), **request.path_params})
        by = By(_actor(caller), datetime.now(timezone.utc))
        async with self._store.write() if operation.writes else self._store.read() as connection:
            try:
                told = await self._work(connection, by, asked)
            except LlmopsError as error:
                raise refused(error) from error
        status = 201 if operation.name in CREATED else 200
        return Response(json.dumps(_data(told), ensure_ascii=False), status, media_type="application/json")

    async def _fields(self, request: Request) -> dict[str, Any]:
        if self._operation.has_body:
            return await body_of_request(request)
        return query_of(request, self._operation.asked)


def _refuse_others(caller: Caller) -> None:
    """Raises ForbiddenError, also where nobody is asked for a key: any page that a browser shows could ask there."""
    if "admin" not in caller.scopes:
        raise ForbiddenError(
            "Administration wants a key with the scope 'admin'; `llmops key create --scopes admin` on a store makes it."
        )


def _actor(caller: Caller) -> str:
    return f"key:{caller.key_id}" if caller.key_id else f"user:{caller.user_id}"


def _data(told: Any) -> Any:
    return [one.data() for one in told] if isinstance(told, tuple) else told.data()


def _documented(operation: Operation[Any, Any]) -> dict[str, Any]:
    parameters = {"parameters": parameters_of(operation.asked, operation.placed, not operation.has_body)}
    return parameters | (body_of(operation.asked) if operation.has_body else {})
