"""Replay of a trace: each request is sent at its time, and its outcome recorded.

Requests are sent on time whatever became of earlier requests.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from llmops.perf.clients import http1
from llmops.perf.lab.trace import TraceRequest
from llmops.perf.records import percentile
from tests.support.mock_engine.repository import NAME


@dataclass
class ReplayedRequest:
    """The outcome of one request.

    Attributes:
        sent, first, last: Seconds from the start of the trace.
        retry_after: Seconds until a rejected request may be sent again (header Retry-After-Ms).
    """

    asked: TraceRequest
    sent: float
    status: int = 0
    first: float = -1.0
    last: float = -1.0
    prompt: int = 0
    made: int = 0
    retry_after: float = 0.0
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and self.made == self.asked.answer

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(self.made - 1, 1)

    def keeps(self, ttft: float, tpot: float) -> bool:
        """Return True if the request was answered within both objectives."""
        return self.ok and self.ttft <= ttft and self.tpot <= tpot


@dataclass
class ReplayResult:
    """The outcome of a whole trace."""

    requests: list[ReplayedRequest] = field(default_factory=list)

    @property
    def ok(self) -> list[ReplayedRequest]:
        return [one for one in self.requests if one.ok]

    def of(self, what: Callable[[ReplayedRequest], float], q: float) -> float:
        """Return a percentile over the requests that were answered."""
        return percentile(sorted(map(what, self.ok)), q)


async def replay(url: str, trace: Sequence[TraceRequest], keys: dict[str, str] | None = None) -> ReplayResult:
    """Send the requests of a trace at their times and return what became of them.

    Every answer has exactly the requested number of tokens. All requests are serialised before the
    first one leaves, and connections are reused: a sender that shares its processor with the server
    takes little of it.

    Args:
        url: Base URL that ends in /v1.
        trace: The requests by time.
        keys: The API key of each tier.
    """
    result, client = ReplayResult(), HttpClient(url)
    requests = [client.request(_body(one), keys[one.tier] if keys else "") for one in trace]
    begun = time.perf_counter()
    tasks = []
    for one, request in zip(trace, requests, strict=True):
        await asyncio.sleep(max(one.at - (time.perf_counter() - begun), 0))
        seen = ReplayedRequest(one, time.perf_counter() - begun)
        result.requests.append(seen)
        tasks.append(asyncio.create_task(_ask(client, request, seen, begun)))
    await asyncio.gather(*tasks)
    client.close()
    return result


def _body(asked: TraceRequest) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": list(asked.ids),
        "max_tokens": asked.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class HttpClient(http1.HttpClient):
    """A client of one server's completions with kept connections."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._path = f"{urlsplit(url).path}/completions"

    def request(self, body: dict[str, Any], key: str) -> bytes:
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        return http1.render("POST", self._path, self.netloc, headers, json.dumps(body).encode())

    async def send(self, request: bytes, response: "ReceivedResponse") -> None:
        """Send a request and receive its response. Raise EOFError if it ends too early."""
        connection = self.idle() or await self.connect()
        connection.send(request, response)
        await response.ended

    async def exchange(self, request: bytes) -> tuple[int, float]:
        """Send a request, read its answer, and return its status and its Retry-After in seconds."""
        response = ReceivedResponse()
        await self.send(request, response)
        return response.status, response.retry_after


class ReceivedResponse:
    """A response as it was received.

    Attributes:
        data: The body.
        pieces: The times at which its pieces came, and the place in `data` at which each begins.
        ended: Is done when the response has ended.
    """

    def __init__(self) -> None:
        self.status, self.retry_after = 0, 0.0
        self.data = bytearray()
        self.pieces: list[tuple[float, int]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def headers(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.retry_after = status, float(headers.get(b"retry-after-ms", 0)) / 1000

    def body(self, data: bytes, now: float) -> None:
        self.pieces.append((now, len(self.data)))
        self.data += data

    def complete(self) -> None:
        self.ended.set_result(None)

    def failed(self, kind: str) -> None:
        self.ended.set_exception(EOFError(kind))


async def _ask(client: HttpClient, request: bytes, seen: ReplayedRequest, begun: float) -> None:
    response = ReceivedResponse()
    try:
        await client.send(request, response)
    except (OSError, EOFError) as error:
        seen.error = repr(error)
    seen.last = time.perf_counter() - begun
    seen.status, seen.retry_after = response.status, response.retry_after
    if seen.status == 200:
        _read(bytes(response.data), [(when - begun, place) for when, place in response.pieces], seen)
    elif not seen.error:
        seen.error = response.data.decode(errors="replace")


def _read(data: bytes, times: Sequence[tuple[float, int]], seen: ReplayedRequest) -> None:
    """Record when the first and the last event with text began to arrive, and the usage."""
    at = 0
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            seen.error = str(event.get("error", "")) or seen.error
            if any(choice.get("text") for choice in event.get("choices", ())):
                seen.last = next(when for when, place in reversed(times) if place <= at)
                seen.first = seen.last if seen.first < 0 else seen.first
            if usage := event.get("usage"):
                seen.prompt, seen.made = usage["prompt_tokens"], usage["completion_tokens"]
        at += len(line) + 1
