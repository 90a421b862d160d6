"""A client of OpenAI's `/chat/completions` and `/completions`, with and without streaming."""

import asyncio
import json
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from llmops.connection_errors import http_connection_error, http_status_error
from llmops.errors import InputError, ServerError
from llmops.perf.clients.base import RequestOptions
from llmops.perf.clients.http1 import Connection, HttpClient, render
from llmops.perf.clients.response_recorder import ResponseRecorder
from llmops.perf.records import Record, Request
from llmops.untrusted_text import is_safe_text
from llmops.urls import without_secrets


class OpenAIBenchClient:
    """A load generator client of an OpenAI endpoint."""

    def __init__(self, url: str, model: str, chat: bool, options: RequestOptions) -> None:
        """Create a client of the API whose base URL `url` ends in /v1."""
        self._model, self._chat, self._options = model, chat, options
        self._http = HttpClient(url)
        self._path = urlsplit(url).path.rstrip("/") + ("/chat/completions" if chat else "/completions")
        self._headers = {"content-type": "application/json", "accept": "*/*", **options.headers}
        if options.api_key:
            self._headers["authorization"] = f"Bearer {options.api_key}"

    async def send(self, request: Request, start: float | None = None) -> Record:
        data = render("POST", self._path, self._http.netloc, self._headers, self._body(request))
        record = Record(start=time.perf_counter() if start is None else start, requested=request.max_tokens)
        connection = self._http.idle()
        if connection is not None:
            await self._exchange(connection, data, request, record)
            if record.error != "disconnected" or connection.answered:
                return record
            # The server had closed the idle connection, which is no failure of this request.
            record.error = None
        try:
            connection = await self._http.connect()
        except OSError:
            record.error, record.end = "connect", time.perf_counter()
            return record
        await self._exchange(connection, data, request, record)
        return record

    async def _exchange(self, connection: Connection, data: bytes, request: Request, record: Record) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        answer = ResponseRecorder(record, request, self._options.stream, done, connection.abort)
        timer = loop.call_later(self._options.timeout, answer.time_out)
        try:
            connection.send(data, answer)
            await done
        except asyncio.CancelledError:
            connection.abort()
            raise
        finally:
            timer.cancel()

    def _body(self, request: Request) -> bytes:
        options = self._options
        body: dict[str, Any] = {"model": self._model, "max_tokens": request.max_tokens, "stream": options.stream}
        if self._chat:
            body["messages"] = request.messages
        else:
            body["prompt"] = request.prompt
        if request.tools:
            body["tools"] = request.tools
        if options.ignore_eos and not request.tools:
            body |= {"ignore_eos": True, "min_tokens": request.max_tokens}
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body | options.extra).encode()

    async def close(self) -> None:
        self._http.close()


async def first_model(url: str, headers: dict[str, str]) -> str:
    """Return the id of the first model in `GET /models`.

    Raises:
        InputError: The server lists no models.
        ServerError: The server cannot be reached, or does not answer with a list of models, or the
            first name has control characters.
    """
    import httpx

    from llmops.response_limits import UNCOMPRESSED, bound_async_response

    base = url.rstrip("/")
    try:
        async with httpx.AsyncClient(
            verify=ssl.create_default_context(),
            timeout=10,
            trust_env=False,
            event_hooks={"response": [bound_async_response]},
        ) as client:
            response = await client.get(base + "/models", headers={**headers, **UNCOMPRESSED})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise http_connection_error(url, error) from error
    if not response.is_success:
        raise http_status_error(base, response.status_code, "")
    base = without_secrets(base)
    try:
        models = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "check the URL, or name a model with --model" if base.endswith("/v1") else f"did you mean {base}/v1?"
        raise ServerError(f"{base}/models is not a list of models; {hint}") from error
    if not models:
        raise InputError(f"{base} lists no models; name one with --model.")
    if not is_safe_text(models[0]):
        raise ServerError(f"{base}/models lists a model whose name has control characters; name one with --model.")
    return models[0]
