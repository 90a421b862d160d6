"""Attack: a stranger makes the gateway write log lines."""

from __future__ import annotations

import time

import pytest

from tests.attacks.harness import exchange, record, scaled

#: Bytes of log for one kind of request, however many come: a few lines each ten seconds.
LOG_BYTES = 4096

KINDS = {
    "invalid": b"\x16\x03\x01\x02\x00",
    "upgrade": b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n",
    "h2c": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "connect": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "large header": b"GET / HTTP/1.1\r\nx: " + b"x" * 66_000,
    "odd target": b"GET //[ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "no method": b"GE\x00 / HTTP/1.1\r\n\r\n",
    "body that is none": b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 1\r\nconnection: close\r\n\r\n{",
    "unknown model": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 26\r\nconnection: close\r\n\r\n"
    b'{"model":"x","prompt":"x"}',
    "no path": b"GET /%b HTTP/1.1\r\nconnection: close\r\n\r\n" % (b"x" * 1000),
}


@pytest.mark.parametrize("kind", KINDS)
def test_requests_write_few_lines(start, kind):
    gateway = start()
    exchange(gateway, KINDS[kind])
    before, sent, began = gateway.log_bytes, 0, time.monotonic()
    while sent < scaled(200, 20_000) and time.monotonic() - began < scaled(3, 20):
        exchange(gateway, KINDS[kind])
        sent += 1
    grown, seconds = gateway.log_bytes - before, time.monotonic() - began
    record(f"{kind}: {sent} requests in {seconds:.1f} s, {grown} bytes of log, {grown / sent:.0f} each")
    assert gateway.alive
    assert grown < LOG_BYTES
