"""The admin API as one who asks sees it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from llmops.connection_errors import http_connection_error
from llmops.control.admin.operations import Operation, RequestT, ResponseT
from llmops.errors import InputError, ServerError, UnknownResourceError

TIMEOUT = httpx.Timeout(30.0, connect=10.0)


class AdminClient:
    """Does operations on the machine at `url`, with an admin's key."""

    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        """Raises InputError for what is not a URL."""
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=TIMEOUT, transport=transport)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise InputError(f"{url} is not a URL; write http://HOST:PORT.") from error

    def do(self, operation: Operation[RequestT, ResponseT], asked: RequestT) -> ResponseT:
        """Raises InputError with the sentence of whoever refuses, ServerError where nobody answers as they should."""
        sent = asked.model_dump(mode="json", by_alias=True, exclude_unset=True)
        path = operation.path.format(**{name: quote(str(sent.pop(name)), safe="") for name in operation.placed})
        where: dict[str, Any] = {"json": sent} if operation.has_body else {"params": sent}
        try:
            answer = self._http.request(operation.method, path, **where)
        except httpx.UnsupportedProtocol as error:
            raise InputError(f"{self._url} is not a URL; write http://HOST:PORT.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            advice = "start `llmops control` or `llmops up --store`, or name another with --url"
            raise http_connection_error(self._url, error, advice) from error
        if not answer.is_success:
            raise self._refused(answer)
        try:
            return operation.answer().validate_json(answer.content)
        except ValidationError as error:
            raise self._no_admin_api_error() from error

    def _refused(self, answer: httpx.Response) -> InputError | ServerError:
        try:
            said = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return self._no_admin_api_error()
        # a gateway alone, which has no such route
        if said.startswith(f"There is no {answer.request.method} {answer.request.url.path}."):
            return self._no_admin_api_error()
        if answer.status_code >= 500:
            return ServerError(f"{self._url} failed: {said}")
        if answer.status_code == 401:
            wanted = "set LLMOPS_API_KEY to a key of the scope admin that it knows"
            return InputError(f"{self._url} refuses this API key ({said.rstrip('.')}); {wanted}.")
        return (UnknownResourceError if answer.status_code == 404 else InputError)(said)

    def _no_admin_api_error(self) -> ServerError:
        return ServerError(
            f"{self._url} answers, and has no admin API: a gateway has one only in an `llmops up` with a store "
            "(--store); name an `llmops control` or such an `llmops up`."
        )
