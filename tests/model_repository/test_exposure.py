"""Tests of what a started Triton exposes.

The real server receives forbidden requests over both protocols.
"""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from llmops.model_repository.launch import TritonServer
from llmops.model_repository.server.exposure import describe_exposure
from tests.model_repository.test_launch import echo_repository, infer, segments
from tests.support.stack import ready_triton
from tests.support.waiting import GENEROUS

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Start a server with HTTP, which is off by default."""
    repository = echo_repository(tmp_path_factory.mktemp("exposed"))
    with ready_triton(repository, http=True) as running:
        yield running


def backend_segment(server: TritonServer) -> str:
    """The shared-memory key of the Python backend's own messages."""
    return next(f"/{path.name}" for path in segments(server) if not path.name.endswith("lock"))


def post(server: TritonServer, path: str, body: dict) -> int:
    request = urllib.request.Request(f"{server.http_url}/v2/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=GENEROUS) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


HTTP: dict[str, Callable[[str, Path], dict]] = {
    "systemsharedmemory/region/evil/register": lambda key, _: {"key": key, "offset": 0, "byte_size": 1000},
    "systemsharedmemory/unregister": lambda *_: {},
    "cudasharedmemory/region/evil/register": lambda *_: {"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 8},
    "logging": lambda _, folder: {"log_file": str(folder / "log")},
    "trace/setting": lambda _, folder: {"trace_file": str(folder / "trace"), "trace_level": ["TIMESTAMPS"]},
    "repository/index": lambda *_: {},
    "repository/models/echo/unload": lambda *_: {},
    "repository/models/echo/load": lambda *_: {},
}


@pytest.mark.parametrize("path", HTTP)
def test_over_http_what_controls_the_server_is_refused(server: TritonServer, path: str, tmp_path: Path) -> None:
    assert post(server, path, HTTP[path](backend_segment(server), tmp_path)) == 403
    assert list(tmp_path.iterdir()) == []


GRPC: dict[str, Callable[[grpc.InferenceServerClient, str], object]] = {
    "register": lambda client, key: client.register_system_shared_memory("evil", key, 1000),
    "unregister": lambda client, _: client.unregister_system_shared_memory(),
    "status": lambda client, _: client.get_system_shared_memory_status(),
    "log": lambda client, _: client.update_log_settings({"log_verbose_level": 1}),
    "trace": lambda client, _: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
}


@pytest.mark.parametrize("call", GRPC)
def test_over_grpc_too(server: TritonServer, call: str) -> None:
    with (
        grpc.InferenceServerClient(server.grpc_address) as client,
        pytest.raises(InferenceServerException, match="restricted, expecting header"),
    ):
        GRPC[call](client, backend_segment(server))


def test_nothing_can_be_loaded_or_unloaded_and_the_gateway_still_finds_the_models(server: TritonServer) -> None:
    with grpc.InferenceServerClient(server.grpc_address) as client:
        for change in (client.unload_model, client.load_model):
            with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
                change("echo")
        assert [model.name for model in client.get_model_repository_index().models] == ["echo"]
    assert b'"data":[7]' in infer(server.http_url)


def send_chunks(port: int, path: str, count: int) -> None:
    """A body of that many chunks of one byte, which the HTTP server of 2.51 counts on its stack."""
    with socket.create_connection(("127.0.0.1", port), timeout=GENEROUS) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"1\r\n \r\n" * count + b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 4")


def test_many_small_chunks_end_neither_a_restricted_api_nor_the_metrics(server: TritonServer) -> None:
    for port, path in ((server.ports.http, "/v2/repository/index"), (server.ports.metrics, "/metrics")):
        send_chunks(port, path, 600_000)
    assert server.is_ready()


def test_by_default_there_is_no_http_server_and_metrics_can_be_closed(tmp_path: Path) -> None:
    with ready_triton(echo_repository(tmp_path), metrics=False) as closed:
        words = Path("/proc", str(closed.pid), "cmdline").read_text().split("\0")
        assert (closed.http_url, closed.metrics_url) == (None, None)
        assert {"--allow-http=false", "--allow-metrics=false"} < set(words)
        assert listening(closed.pid) == {closed.ports.grpc}


def listening(pid: int) -> set[int]:
    """The TCP ports on which a process listens, from /proc."""
    inodes = {str(link.readlink()) for link in Path("/proc", str(pid), "fd").iterdir()}
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


ANYONE = "Open to anyone who reaches 0.0.0.0, without a key:"
CLOSE = "Metrics are closed by --no-metrics. HTTP is off; --http opens it."
LINES = {
    ("127.0.0.1", "", True): f"Open to this machine only: gRPC and metrics. {CLOSE}",
    ("0.0.0.0", "", True): f"{ANYONE} gRPC and metrics (closed by: --host 127.0.0.1). {CLOSE}",
    ("0.0.0.0", "127.0.0.1", False): (
        f"{ANYONE} gRPC (closed by: --host 127.0.0.1). Open to this machine only: HTTP. Metrics are off. HTTP is "
        "closed without --http."
    ),
}


@pytest.mark.parametrize(("host", "http_host", "metrics"), LINES)
def test_the_line_of_serve(host: str, http_host: str, metrics: bool) -> None:
    assert describe_exposure(host, http_host, metrics) == LINES[host, http_host, metrics]
