"""The client of the admin API, remote or on a local store.

The commands `key`, `tenant`, `price`, `usage` and `audit` share this client.
"""

from __future__ import annotations

import asyncio
import getpass
import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

from llmops.distribution import missing_extra
from llmops.errors import InputError, ServerError, UnknownResourceError
from llmops.urls import without_secrets

if TYPE_CHECKING:
    import httpx

    from llmops.control.admin.schemas import AdminSchema, DamagedRow
    from llmops.store.audit import AuditContext

ResponseT = TypeVar("ResponseT")

#: Maximum seconds between two parts of a response. Reports over a large store take some seconds.
TIMEOUT = 30.0
#: Maximum seconds to open a connection, so that an unreachable server is reported soon.
CONNECT_TIMEOUT = 10.0

#: Maximum seconds of a whole call, because a server that keeps sending single bytes would never
#: exceed TIMEOUT.
TOTAL_TIMEOUT = 40.0

_STORE_MODULES = ("sqlalchemy", "alembic", "aiosqlite", "asyncpg")


@dataclass(frozen=True)
class AdminClient:
    """A client of the admin API.

    Attributes:
        store: URL of the local store, used without `url`. Empty for the store in the cache folder.
        url: URL of `llmops control`, or of `llmops up` with a store.
        api_key: An API key with the scope `admin`, sent to `url`.
        transport: A transport of httpx that replaces the network in tests.
    """

    store: str | None = None
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    transport: httpx.AsyncBaseTransport | None = None

    def request(
        self,
        method: str,
        path: tuple[str, ...],
        response_type: type[ResponseT],
        *,
        query: AdminSchema | None = None,
        body: AdminSchema | None = None,
    ) -> ResponseT:
        """Call an endpoint.

        Args:
            method: The HTTP method.
            path: The segments of the path below /api/admin.
            response_type: The type of a successful response.
            query: The query parameters. Only parameters that were set explicitly are sent.
            body: The JSON body. Only fields that were set explicitly are sent.

        Raises:
            InputError: The API rejected the request; the message is the API's.
            ServerError: `url` has no admin API, or the admin API failed.
            LlmopsError: The local store cannot be used.
        """
        for name in path:
            if not name or "/" in name or name in (".", ".."):
                raise UnknownResourceError(f"There is no {path[0].removesuffix('s')} {name!r}; check the spelling.")
        return asyncio.run(self._request(method, path, response_type, query, body))

    @property
    def _base_url(self) -> str:
        return (self.url or "").rstrip("/").removesuffix("/v1")

    async def _request(
        self,
        method: str,
        path: tuple[str, ...],
        response_type: type[ResponseT],
        query: AdminSchema | None,
        body: AdminSchema | None,
    ) -> ResponseT:
        import httpx
        from pydantic import TypeAdapter, ValidationError

        from llmops.connection_errors import check_url, http_connection_error

        if self.url:
            check_url(self._base_url)
        location = "/".join(("/api/admin", *(quote(name, safe="") for name in path)))
        try:
            async with self._connect() as client, asyncio.timeout(TOTAL_TIMEOUT):
                response = await client.request(method, location, params=_set_fields(query), json=_set_fields(body))
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise InputError(f"{without_secrets(self._base_url)} is not a URL; write http://HOST:PORT.") from error
        except (httpx.HTTPError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                error = httpx.ReadTimeout("")
            advice = "start `llmops control` or `llmops up --store`, or name another with --url"
            raise http_connection_error(self._base_url, error, advice) from error
        if not response.is_success:
            raise self._error(response)
        try:
            return TypeAdapter(response_type).validate_json(response.content)
        except ValidationError as error:
            raise self._no_admin_api_error() from error

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[httpx.AsyncClient]:
        import httpx

        if self.url:
            from llmops.response_limits import UNCOMPRESSED, bound_async_response

            headers = {**UNCOMPRESSED, **({"authorization": f"Bearer {self.api_key}"} if self.api_key else {})}
            timeout = httpx.Timeout(TIMEOUT, connect=CONNECT_TIMEOUT)
            try:
                client = httpx.AsyncClient(
                    base_url=self._base_url,
                    headers=headers,
                    timeout=timeout,
                    transport=self.transport,
                    event_hooks={"response": [bound_async_response]},
                )
            except (UnicodeError, ValueError) as error:
                raise httpx.InvalidURL(str(error)) from error
            async with client:
                yield client
            return
        by = current_audit_context()
        from llmops.control.admin.routes import create_local_app
        from llmops.control.api_route import add_routes
        from llmops.control.rollouts.routes import router as rollouts
        from llmops.store.factory import open_store

        async with await open_store(self.store or default_store(), pool_size=1) as store:
            app = create_local_app(store, by.actor)
            add_routes(app, rollouts)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(base_url="http://store", transport=transport) as client:
                yield client

    def _error(self, response: httpx.Response) -> InputError | ServerError:
        """Return the error to raise for an unsuccessful response."""
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._no_admin_api_error()
        # without the parts of `llmops control`, a gateway does not have this route
        if message.startswith(f"There is no {response.request.method} {response.request.url.path}."):
            return self._no_admin_api_error()
        if response.status_code >= 500:
            return ServerError(f"{without_secrets(self._base_url)} failed: {message}")
        if response.status_code == 401:
            advice = "set LLMOPS_API_KEY to a key of the scope admin that it knows"
            place = without_secrets(self._base_url)
            return InputError(f"{place} refuses this API key ({message.rstrip('.')}); {advice}.")
        return (UnknownResourceError if response.status_code == 404 else InputError)(message)

    def _no_admin_api_error(self) -> ServerError:
        return ServerError(
            f"{without_secrets(self._base_url)} answers, but has no admin API: a gateway has one only in an "
            "`llmops up` with a store (--store); name an `llmops control` or such an `llmops up`."
        )


def or_damaged(response_type: type[ResponseT]) -> type[ResponseT | DamagedRow]:
    """Return the type of a response that names a damaged row instead of its values."""
    from llmops.control.admin.schemas import DamagedRow

    return cast("type[ResponseT | DamagedRow]", response_type | DamagedRow)


def key_reference(text: str) -> str:
    """Return the id of a key, or the SHA-256 of its secret, so that no secret is sent."""
    from llmops.store.accounts.key_secrets import hash_secret

    return hash_secret(text) if text.startswith("sk-") else text


def default_store() -> str:
    """Return the URL of the store in the cache folder."""
    from llmops.cache import cached_store

    return f"sqlite:///{cached_store()}"


def require_store_extra() -> None:
    """Raise MissingDependencyError if the libraries of the `store` extra are not installed."""
    missing = [name for name in _STORE_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_extra(f"A store needs {', '.join(missing)}, which is not installed", "store")


def current_audit_context() -> AuditContext:
    """Return the context of a change for the audit log: operating-system user and time."""
    require_store_extra()
    from llmops.store.audit import AuditContext

    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # a container's user may have no name
        name = str(os.getuid())
    return AuditContext(f"cli:{name}", datetime.now(UTC))


def _set_fields(schema: AdminSchema | None) -> dict[str, Any] | None:
    return None if schema is None else schema.model_dump(mode="json", by_alias=True, exclude_unset=True)
