"""A small client of OpenAI endpoints: models, and chat completions as streams."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from llmops.connection_errors import check_url, http_connection_error, http_status_error
from llmops.errors import InputError, ServerError
from llmops.input_files import MALFORMED
from llmops.response_limits import EVENTS, UNCOMPRESSED, bound_response
from llmops.urls import without_secrets

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Maximum number of texts per embedding request. Bounds the request's size and duration.
EMBEDDING_BATCH = 64
KEY_VARIABLES = ("LLMOPS_API_KEY", "OPENAI_API_KEY")


def api_key() -> str | None:
    """Return the API key from the environment, or None."""
    return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)


class ChatDelta(NamedTuple):
    """A piece of an answer's text, or of the reasoning before the text.

    The last piece has the `finish` reason.
    """

    text: str
    reasoning: bool = False
    finish: str = ""


class ContextError(ServerError):
    """An error for a prompt that, together with max_tokens, exceeds the model's context."""


class ChatClient:
    """A client of the endpoint at `url`, which may end with /v1.

    The API key comes from LLMOPS_API_KEY or OPENAI_API_KEY.
    """

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        check_url(url)
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else base + "/v1"
        key = api_key()
        headers = {**UNCOMPRESSED, **({"authorization": f"Bearer {key}"} if key else {})}
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=10),
                event_hooks={"response": [bound_response]},
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InputError(f"--url {without_secrets(url)} is not an HTTP URL; write http://HOST:PORT/v1.") from error

    def models(self) -> list[str]:
        """Return the names of the served models. Raises ServerError without a valid answer."""
        try:
            response = self._http.get("/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise http_connection_error(self.url, error) from error
        self._raise_for(response)
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except MALFORMED as error:
            raise self.malformed() from error

    def chat(self, model: str, messages: list[dict[str, str]], options: dict[str, Any]) -> Iterator[ChatDelta]:
        """Stream one answer.

        Leaving the iterator early closes the connection, which stops the generation.

        Raises:
            ServerError: The server rejected the request, or the connection broke.
        """
        body = {"model": model, "messages": messages, "stream": True, **options}
        try:
            with self._http.stream("POST", "/chat/completions", json=body, extensions=EVENTS) as response:
                if response.status_code != 200:
                    response.read()
                    self._raise_for(response)
                for line in response.iter_lines():
                    try:
                        deltas = list(_deltas(line))
                    except MALFORMED as error:
                        raise self.malformed() from error
                    yield from deltas
        except httpx.HTTPError as error:
            raise http_connection_error(self.url, error) from error

    def post(self, path: str, body: Mapping[str, Any], *, accept: Collection[int] = ()) -> Any:
        """Send `body` to `path` below /v1 and return the JSON of the response.

        Args:
            path: The path below /v1, such as `/embeddings`.
            body: The JSON body of the request.
            accept: HTTP statuses other than 2xx whose JSON is returned instead of raised.

        Raises:
            InputError: A text of `body` cannot be sent.
            ServerError: The server rejected the request, or the connection broke.
        """
        try:
            response = self._http.post(path, json=body)
        except UnicodeEncodeError as error:
            raise InputError("A text of the request has half of a surrogate pair; replace it.") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise http_connection_error(self.url, error) from error
        if response.status_code not in accept:
            self._raise_for(response)
        try:
            return response.json()
        except MALFORMED as error:
            raise self.malformed() from error

    def close(self) -> None:
        self._http.close()

    def malformed(self) -> ServerError:
        """Return the error for a response that does not have the form of OpenAI's API."""
        return ServerError(f"{without_secrets(self.url)} does not answer like an OpenAI endpoint; check the URL.")

    def _raise_for(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            body = response.json()
            message = _message_of(body)
        except MALFORMED:
            body, message = None, ""
        error = body.get("error") if isinstance(body, dict) else None
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            raise ContextError(f"The server refused ({response.status_code}): {message}")
        if response.status_code in (400, 422):
            raise ServerError(f"The server refused ({response.status_code}): {message}")
        raise http_status_error(self.url, response.status_code, message)


def _deltas(line: str) -> Iterator[ChatDelta]:
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return
    event = json.loads(data)
    if event.get("error"):
        raise ServerError(f"The server failed during the answer; try again. Its message: {_message_of(event)}")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            yield ChatDelta(thought, reasoning=True)
        if delta.get("content"):
            yield ChatDelta(str(delta["content"]))
        if choice.get("finish_reason"):
            yield ChatDelta("", finish=str(choice["finish_reason"]))


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def embed_texts(client: ChatClient, model: str, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the vectors FP32 [len(texts), dimensions] of a gateway's embedding model.

    Raises:
        ServerError: The server rejected the request, or did not return a vector for each text.
    """
    import numpy as np

    rows: list[list[float]] = []
    try:
        for at in range(0, len(texts), EMBEDDING_BATCH):
            answer = client.post("/embeddings", {"model": model, "input": list(texts[at : at + EMBEDDING_BATCH])})
            rows += [one["embedding"] for one in answer["data"]]
        vectors = np.array(rows, dtype=np.float32)
    except MALFORMED as error:
        raise client.malformed() from error
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise client.malformed()
    return vectors
