"""Limits on the responses that a server may send to a client of httpx.

`llmops key`, `chat`, `verify`, control and exporters connect to any server that their user names,
so their clients reject compressed responses and bound the size and duration of a response. A stream
of server-sent events has no bound on its duration, so only the length of each line is bounded. A
client requests this with the extensions EVENTS.
"""

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, cast

import httpx

from llmops.urls import refuse_metadata_address

#: Maximum size of a response in bytes. A list of ten thousand keys has 5 MB.
MAX_RESPONSE_BYTES = 32 * 2**20

#: Maximum length in bytes of one line of server-sent events, which bounds the client's memory.
MAX_LINE_BYTES = 4 * 2**20

#: Maximum seconds from the headers of a response to its end. The time before the headers does not
#: count, because a server computes embeddings of many texts then.
MAX_RESPONSE_SECONDS = 60.0

#: Extensions of a request whose client reads the response line by line, as server-sent events.
EVENTS: Any = {"events": True}

#: Extensions of a request whose response is parsed in an event loop that serves other requests.
#: Parsing 1 MiB takes up to 0.2 s and 30 MiB of memory.
SHORT: Any = {"max_bytes": 2**20}

#: Headers of requests with bounded responses. A compressed response could grow from kilobytes to
#: gigabytes.
UNCOMPRESSED: Mapping[str, str] = {"accept-encoding": "identity"}


class UnboundedResponseError(httpx.ReadError):
    """A response that exceeds a limit. The message is a clause without the subject, the server."""


def bound_response(response: httpx.Response) -> None:
    """Limit the size and duration of a response, as a response hook of `httpx.Client`.

    Raises:
        UnboundedResponseError: The response is compressed.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        raise UnboundedResponseError("sends a compressed response, although the request excludes compression")
    # The body of an error is read as a whole, also if the client expects events.
    extensions = response.request.extensions
    is_stream = response.is_success and extensions.get("events", False)
    limit = MAX_LINE_BYTES if is_stream else extensions.get("max_bytes", MAX_RESPONSE_BYTES)
    response.stream = _BoundedStream(response.stream, is_stream, limit)


async def bound_async_response(response: httpx.Response) -> None:
    """Limit the size and duration of a response, as a response hook of `httpx.AsyncClient`."""
    bound_response(response)


#: Arguments of `httpx.AsyncClient` for a URL that came in an HTTP request. They bound all
#: responses, and reject addresses of metadata services.
BOUNDED_ASYNC: Any = {
    "headers": UNCOMPRESSED,
    "event_hooks": {"request": [refuse_metadata_address], "response": [bound_async_response]},
}


class _BoundedStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, inner: Any, is_stream: bool, limit: int) -> None:
        self._inner, self._is_stream, self._limit = inner, is_stream, limit
        self._bytes, self._begun = 0, time.monotonic()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in cast(Iterator[bytes], self._inner):
            self._count(chunk)
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._count(chunk)
            yield chunk

    def close(self) -> None:
        self._inner.close()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _count(self, chunk: bytes) -> None:
        if self._is_stream:
            end = chunk.rfind(b"\n")
            self._bytes = self._bytes + len(chunk) if end < 0 else len(chunk) - end - 1
        else:
            self._bytes += len(chunk)
            if time.monotonic() - self._begun > MAX_RESPONSE_SECONDS:
                raise UnboundedResponseError(f"sends a response for more than {MAX_RESPONSE_SECONDS:.0f} s")
        if self._bytes > self._limit:
            what = "one line" if self._is_stream else "one response"
            raise UnboundedResponseError(f"sends more than {self._limit >> 20} MiB in {what}")
