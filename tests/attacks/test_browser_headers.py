"""Headers of strangers that cost CPU or log lines, and requests that a page of another site makes a browser send."""

from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest

from tests.attacks.harness import Gateway, exchange, record, scaled

#: CPU seconds that a request of a stranger may take, and log bytes for all requests of one kind.
CPU, LOG_BYTES = 0.01, 2000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, engine) -> Iterator[Gateway]:
    # a request beyond the limit of reads would cost nothing
    made = Gateway(tmp_path_factory.mktemp("gateway"), engine.address, limits={"reads_per_second": 0})
    made.ready()
    yield made
    made.stop()


COOKIES = [b'llmops_key="' + rb"\141" * 15_000 + b'"', b"; ".join(b"c%d=x" % number for number in range(6000))]
HEADERS = [*(b"cookie: " + one for one in COOKIES), b"origin: http://[", b"origin: http://[::1]:x"]


@pytest.mark.parametrize("header", HEADERS, ids=["octal cookie", "many cookies", "half an address", "no port"])
def test_headers_of_strangers_are_cheap(gateway, header):
    (name, value), count = header.split(b": ", 1), scaled(20, 1000)
    connection = HTTPConnection(gateway.host, gateway.port)
    used, logged = gateway.cpu(), gateway.log_bytes
    with closing(connection):
        for _ in range(count):
            connection.request("GET", "/v1/models", headers={name.decode(): value})
            answer = connection.getresponse()
            answer.read()
            assert answer.status in (200, 401, 403)
    used, logged = (gateway.cpu() - used) / count, gateway.log_bytes - logged
    record(f"{used * 1000:.1f} ms of CPU per request, {logged} bytes of log")
    assert used < CPU
    assert logged < LOG_BYTES


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/conversations", b"/v1/responses"])
def test_a_page_of_another_site_cannot_make_a_browser_post(gateway, engine, path):
    """A browser sends such a request without asking the gateway first."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}'

    def post(*headers: bytes) -> bytes:
        lines = [b"POST " + path + b" HTTP/1.1", b"host: localhost:9000", b"connection: close", *headers]
        return exchange(gateway, b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]) + body)

    simple, before = b"content-type: text/plain", engine.requests
    for media_type in (simple, simple + b";charset=application/json", simple + b";a=+json", b"content-type:"):
        assert b"foreign_origin" in post(media_type, b"origin: https://evil.example")
        assert b"foreign_origin" in post(media_type, b"origin: null")
        # before the fix, a key that a proxy adds for the user made such a request count as asked
        assert b"foreign_origin" in post(media_type, b"origin: https://evil.example", b"authorization: Bearer key")
    assert engine.requests == before
    asked = [b"content-type: application/json", b"origin: https://app.example", b"authorization: Bearer key"]
    for own in ([simple, b"origin: http://localhost:9000"], [simple], asked):
        assert b"foreign_origin" not in post(*own)
