"""Attack: clients, a full disk and a slow receiver against access log and traces."""

import errno
import os

import pytest

from llmops.errors import ResourceError
from llmops.gateway.telemetry.access_log import AccessLogFile
from tests.attacks.harness import MIB, exchange, max_growth, posted, record, scaled
from tests.support.pages import Page, PageServer, Request
from tests.support.waiting import wait_until

MEMORY = 24 * MIB


ASKED = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
HOSTILE = {
    "sampled": b"traceparent: 00-%032x-%016x-01" % (7, 7),
    "long tracestate": b"traceparent: 00-%032x-%016x-01\r\ntracestate: " % (7, 7) + b"a=" + b"b" * 50_000,
    "many members": b"traceparent: 00-%032x-%016x-01\r\ntracestate: " % (7, 7) + b",".join([b"a=b"] * 10_000),
    "twice": b"\r\n".join([b"traceparent: 00-%032x-%016x-01" % (7, 7)] * 240),
    "zeros": b"traceparent: 00-%032d-%016d-01" % (0, 0),
    "long": b"traceparent: 00-" + b"a" * 50_000,
    "not ascii": b"traceparent: 00-\xff\xfe\xe9\xa0\x80-01\r\ntracestate: \xff=\xff",
    "other version": b"traceparent: ff-%032x-%016x-01-" % (7, 7) + b"x" * 1000,
}


@pytest.fixture
def receiver():
    """A receiver of traces, and the sizes of the bodies that it got."""
    pytest.importorskip("opentelemetry.proto")
    sizes: list[int] = []

    def count(request: Request) -> Page:
        sizes.append(len(request.body))
        return Page()

    with PageServer(count) as server:
        yield server.url, sizes


def post(headers: bytes) -> bytes:
    return posted("/v1/completions", ASKED, b"connection: close\r\n%b\r\n" % headers)


def test_trace_headers_cost_what_others_do(start, engine, receiver):
    endpoint, sizes = receiver
    gateway = start(engine.address, traces={"endpoint": endpoint, "ratio": 0})
    exchange(gateway, post(HOSTILE["sampled"]))
    rounds = scaled(20, 500)
    with max_growth(gateway, MEMORY):
        for kind, headers in [*HOSTILE.items()] * rounds:
            answer = exchange(gateway, post(headers))
            assert answer.startswith(b"HTTP/1.1 200"), (kind, answer[:300])
        wait_until(lambda: len(sizes) > 0, "a delivery of traces")
    each = sum(sizes) / rounds / len(HOSTILE)
    record(f"{each:.0f} bytes per request to the receiver")
    assert each < 4096
    assert gateway.log_bytes < 4096


def test_a_line_that_was_torn_does_not_spoil_the_next(tmp_path, monkeypatch):
    """A disk that fills up in the middle of a line, and has room again: every later line is whole."""
    file, write, room = tmp_path / "access.log", os.write, [20, 0, 1000]

    def written(descriptor: int, data: bytes) -> int:
        if not room[0]:
            room.pop(0)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: room.pop(0)])

    lines = AccessLogFile(str(file))
    monkeypatch.setattr(os, "write", written)
    with pytest.raises(OSError, match="No space"):
        lines._write(b'{"first":"a line that is cut off"}\n')
    lines._write(b'{"second":"whole"}\n')
    monkeypatch.undo()
    lines.close()
    assert file.read_text().splitlines()[1:] == ['{"second":"whole"}']


@pytest.mark.timeout(20)
def test_a_pipe_without_a_reader_stops_neither_the_start_nor_the_lines_after_it(tmp_path):
    """Opening such a pipe waits for a reader: the gateway listened, and answered nothing."""
    file = tmp_path / "access.log"
    lines = AccessLogFile(str(file))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ResourceError, match="it is a pipe without a reader"):
        AccessLogFile(str(file))
    with pytest.raises(OSError, match="No such device"):
        lines.write([])
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    lines.write([])
    lines._write(b"{}\n")
    assert os.read(reader, 10) == b"{}\n"
    lines.close()
    os.close(reader)
