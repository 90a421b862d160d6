"""Requests whose bytes before the body are faulty.

They are broken, endless, doubled, cut off, or contradict themselves.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from tests.faults.fuzz.base import Case, Target

# seconds; what has no answer by then was not a whole request
PATIENCE = 0.5
_METHODS = (
    b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"PATCH", b"CONNECT", b"TRACE", b"post", b"", b"\x00",
    b"PRI",
)  # fmt: skip
_PATHS = (
    b"/v1/chat/completions", b"/v1/models", b"/health/live", b"/", b"*", b"/v1/models/%ff%00", b"//",
    b"/?" + b"q" * 70_000, b"http://x/v1/models", b"/v1/responses/" + b"r" * 9000, b"/\xc3\xa9", b"/..%2f..", b"",
)  # fmt: skip
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"HTTP/1.1 x")
_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n ")
_LINES = (
    b"content-length: -1", b"content-length: 1, 1", b"content-length: 99999999999999999999", b"content-length: 5",
    b"content-length: x", b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: xchunked", b"expect: 100-continue", b"upgrade: websocket\r\nconnection: upgrade",
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings", b"connection: keep-alive", b"host:",
    b"host: a\r\nhost: b", b": x", b"no colon", b"a\x00b: c", b"a: \x00", b"a: b\r\n c",
    b"x-request-id: " + b"i" * 500, b"x-request-id: \xff\xfe", b"authorization: Bearer " + b"k" * 9000,
    b"content-type: text/xml", b"content-encoding: gzip", b"accept-encoding: \x7f", b"cookie: " + b"c=d; " * 2000,
    b"x-" + b"n" * 70_000 + b": x",
)  # fmt: skip
_CHUNKS = (
    b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"-1\r\n",
    b"5;" + b"e" * 80_000 + b"\r\nhello\r\n", b"0\r\n" + b"t: u\r\n" * 20_000, b"2\r\n{}\r\n0\r\nx", b"5\r\nhel",
)  # fmt: skip


@dataclass(frozen=True)
class Raw(Case):
    """`body` is all that is sent, its header included."""

    async def send(self, client: httpx.AsyncClient) -> httpx.Response | None:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        try:
            writer.write(self.body)
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.drain(), PATIENCE)
            return await _first_answer(reader, has_body=not self.body.startswith(b"HEAD "))
        finally:
            writer.transport.abort()


async def _first_answer(reader: asyncio.StreamReader, has_body: bool) -> httpx.Response | None:
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = httpx.Headers([(name, value) for name, _, value in (line.partition(": ") for line in lines)])
        # behind the header of an answer to HEAD stands the next answer
        size = int(headers.get("content-length", 0)) if has_body else 0
        body = await asyncio.wait_for(reader.readexactly(size), PATIENCE) if size else b"{}"
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return None
    status = int(first.split()[1])
    if status == 100 or headers.get("transfer-encoding") == "chunked" or (not has_body and status < 500):
        return None
    return httpx.Response(status, headers=headers, content=body)


def cases(target: Target, chance: random.Random) -> Iterator[Case]:
    """Endless; half of them begin as a valid request."""
    body = json.dumps({"model": target.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    while True:
        yield Raw("(raw)", _damaged(_request(body, chance), chance), refusals=frozenset({503}))


def _request(body: bytes, chance: random.Random) -> bytes:
    right = chance.random() < 0.5
    method, path, version = (chance.choice(one) for one in (_METHODS, _PATHS, _VERSIONS))
    start = b"POST /v1/chat/completions HTTP/1.1" if right else b" ".join((method, path, version))
    lines = [b"host: x", *chance.choices(_LINES, k=chance.choice((0, 1, 1, 2, 5)))]
    if chance.random() < 0.1:
        lines += [b"a: b"] * chance.choice((100, 5000, 40_000))
    if right and chance.random() < 0.5:
        lines.append(b"content-length: %d" % len(body))
    chance.shuffle(lines)
    end = chance.choice(_ENDS)
    after = body if chance.random() < 0.6 else chance.choice(_CHUNKS)
    return end.join([start, *lines]) + end + end + after


def _damaged(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.7 or len(data) < 2:
        return data
    at = chance.randrange(len(data))
    flipped = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    return chance.choice((data[:at], flipped, data + data, data[at:], data[:at] + b"\r\n" * 40_000))
