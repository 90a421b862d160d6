"""An OpenAI server that does nothing but wait: known delays to check a load generator against.

It streams answers of `max_tokens` tokens: the first after `ttft`, the next ones at `first + n × itl` by its own
clock, so that lateness does not add up. It records when it really sent each token (`sent`), against which a client's
figures are checked.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "delay", "object": "model"}]}).encode()


@dataclass(frozen=True)
class Delays:
    """Seconds before the first token and between two; with `usage` the last event counts them."""

    ttft: float = 0.1
    itl: float = 0.01
    usage: bool = True


@dataclass
class Served:
    """One request as the server saw it: when it was read, and when each token was written."""

    read: float
    body: dict[str, Any]
    sent: list[float] = field(default_factory=list)


class DelayServer:
    """`async with DelayServer(delays) as server` listens on a free port of the loopback; `server.url` ends in /v1."""

    def __init__(self, delays: Delays) -> None:
        self.delays = delays
        self.served: list[Served] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "DelayServer":
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (request := await _read(reader)) is not None:
                await self._respond(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _respond(self, request: tuple[str, bytes], writer: asyncio.StreamWriter) -> None:
        path, raw = request
        if path.endswith("/models"):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(MODELS)
            writer.write(head + MODELS)
            return
        served = Served(time.perf_counter(), json.loads(raw))
        self.served.append(served)
        writer.write(STREAM_HEAD)
        count, first = served.body["max_tokens"], served.read + self.delays.ttft
        for index in range(count):
            await asyncio.sleep(max(0.0, first + index * self.delays.itl - time.perf_counter()))
            if writer.is_closing():
                return
            served.sent.append(time.perf_counter())
            writer.write(_event([{"index": 0, "finish_reason": None, "delta": {"content": "the "}}]))
        writer.write(_event([{"index": 0, "delta": {}, "finish_reason": "length"}]))
        if self.delays.usage and served.body.get("stream_options", {}).get("include_usage"):
            words = sum(len(message["content"].split()) for message in served.body["messages"])
            usage = {"prompt_tokens": words, "completion_tokens": count, "total_tokens": words + count}
            writer.write(_event([], usage=usage))
        writer.write(_frame(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = {"id": "chatcmpl-delay", "object": "chat.completion.chunk", "created": 0, "model": "delay"}
    return _frame(b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n")


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return lines[0].split(" ")[1], body
