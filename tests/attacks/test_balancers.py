"""Attack: requests that HAProxy or Envoy and the gateway might read differently, and addresses that are forged.

The real proxies run as deploy/ configures them. Each smuggled request asks for /v1/models, which no request asks for
that the proxy is meant to see.
"""

import contextlib
import json
import socket
from pathlib import Path

import pytest

from llmops.errors import ServerError
from tests.attacks.harness import Gateway, record
from tests.support import balancers
from tests.support.waiting import GENEROUS, wait_until

LAST = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n"
SIZE = b"content-length: %d\r\n" % len(b"0\r\n\r\n" + HIDDEN)
CHUNKED = b"transfer-encoding: chunked\r\n"
BODY = b"0\r\n\r\n" + HIDDEN
UPGRADE = (
    b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade%%b\r\nupgrade: %%b\r\ncontent-length: %d\r\n\r\n"
)
UPGRADE %= len(HIDDEN)
SMUGGLED = {
    "CL.TE": POST + SIZE + CHUNKED + b"\r\n" + BODY,
    "TE.CL": POST + CHUNKED + SIZE + b"\r\n" + BODY,
    "TE with a space": POST + SIZE + b"transfer-encoding : chunked\r\n\r\n" + BODY,
    "TE after a tab": POST + SIZE + b"transfer-encoding:\tchunked\r\n\r\n" + BODY,
    "TE with a vertical tab": POST + SIZE + b"transfer-encoding: \x0bchunked\r\n\r\n" + BODY,
    "TE twice": POST + SIZE + CHUNKED + b"transfer-encoding: identity\r\n\r\n" + BODY,
    "TE of two": POST + SIZE + b"transfer-encoding: chunked, identity\r\n\r\n" + BODY,
    "TE unknown": POST + SIZE + b"transfer-encoding: xchunked\r\n\r\n" + BODY,
    "TE in quotes": POST + SIZE + b'transfer-encoding: "chunked"\r\n\r\n' + BODY,
    "TE folded": POST + SIZE + b"transfer-encoding:\r\n chunked\r\n\r\n" + BODY,
    "TE behind a bare LF": POST + SIZE + b"x: y\ntransfer-encoding: chunked\r\n\r\n" + BODY,
    "TE behind a bare CR": POST + SIZE + b"x: y\rtransfer-encoding: chunked\r\n\r\n" + BODY,
    "TE with an underscore": POST + SIZE + b"transfer_encoding: chunked\r\n\r\n" + BODY,
    "TE in HTTP/1.0": POST.replace(b"1.1", b"1.0") + SIZE + CHUNKED + b"connection: keep-alive\r\n\r\n" + BODY,
    "CL twice": POST + b"content-length: 0\r\n" + SIZE + b"\r\n" + BODY,
    "CL twice, the other way": POST + SIZE + b"content-length: 0\r\n\r\n" + BODY,
    "CL of two": POST + b"content-length: 0, %d\r\n\r\n" % len(BODY) + BODY,
    "CL with a plus": POST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "CL in hexadecimal": POST + b"content-length: 0x%x\r\n\r\n" % len(BODY) + BODY,
    "CL below zero": POST + b"content-length: -1\r\n\r\n" + BODY,
    "CL with a space within": POST + b"content-length: 1 0\r\n\r\n" + BODY,
    "CL beyond 64 bits": POST + b"content-length: 18446744073709551616\r\n\r\n" + BODY,
    "chunk size with 0x": POST + CHUNKED + b"\r\n0x0\r\n\r\n" + HIDDEN,
    "chunk size beyond 64 bits": POST + CHUNKED + b"\r\n10000000000000000\r\n\r\n" + HIDDEN,
    "chunk extension with LF": POST + CHUNKED + b"\r\n2;a\nxx\r\n%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n0\r\n\r\n",
    "chunk without its end": POST + CHUNKED + b"\r\n2\r\n{}%x\r\n" % len(HIDDEN) + HIDDEN + b"\r\n0\r\n\r\n",
    "body of a GET": b"GET /health/live HTTP/1.1\r\nhost: x\r\n" + SIZE + b"\r\n" + BODY,
    "upgrade": UPGRADE % (b"", b"websocket\r\nsec-websocket-version: 777") + HIDDEN,
    "upgrade to HTTP/2": UPGRADE % (b", http2-settings", b"h2c\r\nhttp2-settings: AAMAAABkAAQAAP__") + HIDDEN,
    "expect": POST + SIZE + b"expect: 100-continue\r\n\r\n" + BODY,
    "line break in the target": b"GET /health/live%0d%0a%0d%0aGET%20/v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "line break in a header": b"GET /health/live HTTP/1.1\r\nhost: x\r\nx: a\\r\\n\\r\\nGET /v1/models\r\n\r\n",
    "absolute target": b"GET http://x/health/live HTTP/1.1\r\nhost: y\r\n" + SIZE + b"\r\n" + BODY,
    "NUL in a header": POST + SIZE + b"x: a\0b\r\n" + CHUNKED + b"\r\n" + BODY,
}


@pytest.fixture(params=[balancers.haproxy, balancers.envoy], ids=["haproxy", "envoy"])
def proxied(request, start, engine, tmp_path: Path, programs):
    """A gateway, and the port of a proxy in front of it."""
    gateway = start(engine.address, limits={"connections_per_client": 0}, access_log=str(tmp_path / "access.log"))
    try:
        made = balancers.balancer(request.param, tmp_path, [f"127.0.0.1:{gateway.port}", "127.0.0.1:9"])
        url = programs.enter_context(made)
    except ServerError as error:
        pytest.skip(str(error))
    port = int(url.rpartition(":")[2])
    wait_until(lambda: is_ready(port), "a ready proxy")
    return gateway, port


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        return through(port, LAST).startswith(b"HTTP/1.1 200")
    return False


def through(port: int, sent: bytes) -> bytes:
    """Send a request that ends its connection, and return all that the proxy answers."""
    return answers_of(sending(port, sent))


def passed_on(port: int, sent: bytes) -> bytes:
    """Return the first answer of `through` that is no 503, with which a proxy answers while a busy engine is silent."""
    answers: list[bytes] = []

    def is_passed_on() -> bool:
        answers.append(through(port, sent))
        return not answers[-1].startswith(b"HTTP/1.1 503")

    wait_until(is_passed_on, "an answer of the gateway")
    return answers[-1]


def sending(port: int, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), GENEROUS)
    made.sendall(sent)
    return made


def answers_of(made: socket.socket, seconds: float = GENEROUS) -> bytes:
    """Everything that comes until the connection ends, or is silent for `seconds`."""
    received = b""
    made.settimeout(seconds)
    with made, contextlib.suppress(OSError):
        while part := made.recv(65536):
            received += part
    return received


def hidden(gateway: Gateway) -> float:
    return gateway.metric(r'llmops_requests_total\{route="/v1/models"')


def test_no_request_is_smuggled_past_a_proxy(proxied):
    gateway, port = proxied
    through(port, LAST.replace(b"/health/live", b"/v1/models"))
    assert hidden(gateway) == 1, "a request that is not hidden arrives and is counted"
    open_now = {name: sending(port, sent) for name, sent in SMUGGLED.items()}
    # the next clients of the proxy's connections to the gateway get their own answers
    assert all(b'{"status":"live"}' in through(port, LAST) for _ in range(20))
    # what a proxy has seen as a second request of its client, it answers
    seen = {name: answers_of(made, 0.2).count(b'"object":"list"') for name, made in open_now.items()}
    record(f"{len(SMUGGLED)} forms, {sum(seen.values())} read as two requests by the proxy too, none by one alone")
    assert hidden(gateway) - 1 == sum(seen.values()), seen


def test_no_header_makes_a_caller_someone_else(proxied, tmp_path):
    _, port = proxied
    forged = [
        b"x-llmops-caller: " + json.dumps(["other", "user", "key-1", "other/key-1"]).encode(),
        b"x-forwarded-for: 127.0.0.1", b"forwarded: for=127.0.0.1", b"x-real-ip: 10.0.0.1",
        b"x-envoy-original-path: /metrics", b"x-original-url: /metrics", b"x-rewrite-url: /metrics",
        b"x-http-method-override: POST",
    ]  # fmt: skip
    for header in forged:
        answer = passed_on(port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b\r\n\r\n" % header)
        assert b'"object":"list"' in answer, (header, answer)
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert all(line["tenant"] is None and line["key"] is None for line in lines)
