"""Attack: a client makes the gateway hold what it sent, or what it does not read.

One connection sends requests without waiting for their answers, in all the forms that a parser might take ahead of
time; many connections ask for large answers and do not read them.
"""

import contextlib
import socket
import time

from llmops.gateway.http.connection_limits import connection_limits
from llmops.gateway.settings import GatewaySettings
from tests.attacks.harness import LIVE, MIB, Neighbour, connect, exchange, max_growth, posted, record, scaled, status
from tests.attacks.test_connections import Held
from tests.support.waiting import GENEROUS

#: Bytes that one connection may make the gateway hold, whatever it sends.
MEMORY = 16 * MIB

#: Bytes that all answers together may hold that no client reads, above what the gateway uses by itself.
UNREAD = 112 * MIB

#: Seconds within which 95 of 100 requests of other clients are answered while the attack lasts.
OTHERS_P95 = 0.25

STREAM = {"model": "tiny", "prompt": "Hello", "max_tokens": 200, "stream": True}
POST = b"POST /%b HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n"
SIZE, CHUNKED = b"content-length: %d", b"transfer-encoding: chunked"
FORMS = {
    "small requests": (b"", LIVE),
    "requests without lines between": (b"", b"GET / HTTP/1.1\r\n\r\n"),
    "large headers": (b"", b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-pad: %b\r\n\r\n" % (b"p" * 60_000)),
    "behind a running answer": (b"stream", LIVE),
    "large bodies behind a running answer": (b"stream", POST % (b"tokenize", SIZE % 1_000_000) + b" " * 1_000_000),
    "after a body": (b"", POST % (b"none", SIZE % 5000) + b" " * 5000 + LIVE * 2000),
    "after a chunked body": (b"", POST % (b"none", CHUNKED) + b"5\r\n12345\r\n0\r\n\r\n" + LIVE * 2000),
}


def pour(made: socket.socket, piece: bytes, total: int, seconds: float) -> int:
    """Send `piece` again and again until `total` bytes are sent or the gateway takes nothing for a second."""
    sent, deadline = 0, time.monotonic() + seconds
    piece *= max(1, 16384 // len(piece))
    made.settimeout(1.0)
    with contextlib.suppress(OSError):
        while sent < total and time.monotonic() < deadline:
            sent += made.send(piece)
    made.settimeout(GENEROUS)
    return sent


def test_a_pipeline_without_end_is_not_held(start, own_engine):
    gateway = start(own_engine(200, 0.1).address)
    with max_growth(gateway, MEMORY):
        for form, (first, piece) in FORMS.items():
            with connect(gateway) as made, Neighbour(gateway, p95=OTHERS_P95):
                if first:
                    made.sendall(posted("/v1/completions", STREAM))
                    assert made.recv(100).startswith(b"HTTP/1.1 200")
                sent = pour(made, piece, scaled(4 * MIB, 45 * MIB), scaled(2, 60))
            record(f"{form}: {sent / MIB:.1f} MiB sent")


def test_answers_that_nobody_reads_are_bounded_together(start):
    gateway = start()
    asked = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 40
    with contextlib.ExitStack() as stack, max_growth(gateway, UNREAD), Neighbour(gateway):
        for number in range(scaled(120, 3000)):
            with contextlib.suppress(OSError):
                stack.enter_context(connect(gateway, f"127.0.1.{number % 3 + 1}", receive_buffer=4096)).sendall(asked)
        time.sleep(scaled(1, 20))


def test_a_new_connection_does_not_wait_for_the_pipelines_of_others(start):
    """Before the fix, the gateway worked for 8 s on 400 connections before it answered a new one."""
    gateway = start()
    exchange(gateway, LIVE)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connect(gateway, f"127.0.1.{n % 3 + 1}")) for n in range(scaled(200, 400))]
        for made in many:
            made.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        before = gateway.cpu()
        assert status(gateway, LIVE, "127.0.0.99") == 200
        spent = gateway.cpu() - before
    record(f"{len(many)} pipelines: {spent:.2f} s of CPU before a new connection was answered")
    assert spent < OTHERS_P95


def test_who_pipelines_the_most_is_dropped():
    """Before the fix, the connection that sent the last byte was dropped, and its caller's answer with it."""
    limits = connection_limits(GatewaySettings())
    attackers = [Held(limits, "127.0.1.1", progress=None) for _ in range(70)]
    for one in attackers:
        limits.hold_pipelined(one, 16 * MIB // 70)
    victim = Held(limits, "127.0.0.99", progress=None)
    limits.hold_pipelined(victim, 4096)
    assert not any(one.evicted for one in (*attackers, victim))
    assert not victim.aborted
    dropped = [one.aborted for one in attackers].count(True)
    assert 0 < dropped < 20
    assert limits.pipelined.total == (70 - dropped) * (16 * MIB // 70) + 4096
