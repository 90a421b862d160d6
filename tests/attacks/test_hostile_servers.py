"""Servers that attack whoever asks them: `llmops key`, `chat`, `bench`, `verify` and `top` against hostile answers."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import grpc.aio
import httpx
import pytest
from starlette.requests import Request as HttpRequest
from tritonclient.grpc import service_pb2 as pb

from llmops import contract
from llmops.cli.monitor.exposition import MAX_PAGES, MetricsPage, MetricsWindow
from llmops.control import models_api
from llmops.control.reconcile import SERVED_TOKENS_METRIC, served_tokens
from llmops.errors import ResourceError, ServerError
from llmops.gateway.errors import UnavailableError
from llmops.perf.clients.base import RequestOptions
from llmops.perf.clients.triton import TritonBenchClient
from llmops.perf.records import Request
from llmops.untrusted_text import UNSAFE_CHARACTERS
from tests.attacks.harness import MIB
from tests.support import forked_cli
from tests.support.live_process import LLMOPS
from tests.support.pages import PageServer

#: What a terminal obeys, in the place of each text.
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
#: Memory of a command, which takes 55 to 95 MiB by itself. On the tree before, it grew without end.
BOUND_MIB = 200

Answer = Callable[[BaseHTTPRequestHandler], None]
#: The content type of server-sent events.
EVENTS = "text/event-stream"


def reply(handler: BaseHTTPRequestHandler, body: bytes, kind: str = "application/json", status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("content-type", kind)
    handler.end_headers()
    handler.wfile.write(body)


def endless(handler: BaseHTTPRequestHandler, kind: str = "application/json", start: bytes = b"") -> None:
    reply(handler, start, kind)
    piece = b"data: {}\n\n" * 100_000 if kind == EVENTS else b"x" * MIB
    for _ in range(3000):
        handler.wfile.write(piece)


def endless_events_to_streams(handler: BaseHTTPRequestHandler) -> None:
    if handler.path.endswith("/chat/completions") and b'"stream": true' in handler.body.replace(b":true", b": true"):
        endless(handler, EVENTS)
    else:
        choice = {"message": {"content": "x"}, "text": "x", "finish_reason": "stop"}
        reply(handler, json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode())


def with_models(answer: Answer) -> Answer:
    """Answer `/models` well, and all other paths with `answer`."""

    def served(handler: BaseHTTPRequestHandler) -> None:
        if handler.path.endswith("/models"):
            reply(handler, b'{"data": [{"id": "m"}]}')
        else:
            answer(handler)

    return served


def events(*data: object) -> bytes:
    return b"".join(f"data: {json.dumps(one)}\n\n".encode() for one in data) + b"data: [DONE]\n\n"


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    with PageServer(answer) as made:
        yield made.url


#: Runs a command with a bounded memory, and prints its largest memory in KiB last. The kernel counts what the parent of
#: a command weighs as the command's own: this parent is small, unlike a worker of pytest.
MEASURED = (
    "import resource, subprocess, sys\n"
    f"resource.setrlimit(resource.RLIMIT_DATA, ({4 * BOUND_MIB * MIB},) * 2)\n"
    "subprocess.run(sys.argv[1:])\n"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
)


def run(command: str, url: str) -> str:
    """Run a command, whose memory is bounded, and return all that it prints."""
    words = [word.replace("URL", url) for word in command.split()]
    done = subprocess.run([sys.executable, "-c", MEASURED, *LLMOPS, *words], capture_output=True, timeout=90)
    errors, _, peak = done.stderr.decode().rstrip("\n").rpartition("\n")
    assert int(peak) / 1024 < BOUND_MIB
    said = done.stdout.decode() + errors
    assert "Traceback" not in said, said[-2000:]
    assert UNSAFE_CHARACTERS.search(said.replace("\n", "")) is None
    return said


KEY, CHAT = "key list --url URL", "chat --url URL --once hi"
TYPES = [{"choices": [None]}, {"choices": [{"delta": {"content": 5}}]}, 5, {"usage": {"completion_tokens": 10**400}}]


BENCH = "bench URL/v1 -n 3 --warmup 0 --turns 2 --timeout 5s"
WORDS = events({"choices": [{"delta": {"content": 5}}]})
CALL = {"index": 0, "function": {"name": "get_weather", "arguments": "[" * 100_000}}
CALLS = events({"choices": [{"delta": {"tool_calls": [CALL]}}]})
NOW = "2026-11-26T00:00:00Z"
VERSION = {"name": f"v1{ESCAPE}", "engine": "", "replicas": [], "weight": 1e12, "state": "active"}
NAMES = {"id": "1", "model": "m", "stable": VERSION["name"], "candidate": "v2", "reason": "", "settings": {}}
PROGRESS = {"state": "shifting", "percent": 5, "started_at": NOW, "changed_at": NOW, "open": True}
ROLLOUT = {**NAMES, **PROGRESS, "versions": [VERSION]}
ROW = {"metric": "ttft", "stable": 1.0, "canary": 2.0, "unit": "s", "state": "ok", "note": ""}


def rollout_with(**verdict: object) -> Answer:
    return lambda one: reply(one, json.dumps([{**ROLLOUT, "verdict": verdict}]).encode())


@pytest.mark.parametrize(
    ("command", "answer", "message"),
    [
        # before the fixes, these hung for ever, lost the run, printed the escapes, or ended with tracebacks
        (BENCH, with_models(lambda one: reply(one, WORDS, "text/event-stream")), "Error protocol"),
        (f"{BENCH} --tools 1", with_models(lambda one: reply(one, CALLS, "text/event-stream")), "Tool calls"),
        (BENCH, with_models(lambda one: reply(one, b'{"error": {"code": "[/x]"}}', status=429)), "http_429 [/x]"),
        ("rollout status m --url URL", rollout_with(decision="a", reason="b", rows=[ROW]), "v1\\x1b]0"),
        ("rollout status m --url URL", rollout_with(decision="a", reason="b", rows=[{}]), "verdict has a form"),
        # before the fixes, what the server called events had no bound: 815 MB in 2 s, and a traceback
        (KEY, lambda one: endless(one, EVENTS), "sends more than 32 MiB in one response"),
        (CHAT, lambda one: endless(one, EVENTS), "sends more than 32 MiB in one response"),
        ("verify --url URL", lambda one: endless(one, EVENTS), "sends more than 32 MiB in one response"),
        ("verify --url URL", with_models(endless_events_to_streams), "more than 1000 events"),
        (KEY, endless, "sends more than 32 MiB in one response"),
        (CHAT, endless, "sends more than 32 MiB in one response"),
        (CHAT, with_models(lambda one: endless(one, "text/event-stream; x", b"data: ")), "more than 4 MiB in one line"),
        (CHAT, with_models(lambda one: reply(one, events(*TYPES), "text/event-stream")), "like an OpenAI endpoint"),
        (CHAT, with_models(lambda one: reply(one, b"data: " + b'{"a":' * 100_000, "text/event-stream")), "OpenAI"),
        (CHAT, lambda one: reply(one, b"[" * 100_000), "does not answer like an OpenAI endpoint"),
    ],
)
def test_a_command_ends_with_one_sentence(command: str, answer: Answer, message: str) -> None:
    """Before the fix, an endless answer took all memory (9.6 GB in 45 s), and odd ones ended with a traceback."""
    with server(answer) as url:
        assert message in run(command, url)


def test_a_webhook_that_fails_prints_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    """Before the fix, warnings of commands were printed as they are, with the status line of a server."""
    start = f"rollout start m --replica 127.0.0.1:1 --name v2 --store sqlite:///{tmp_path}/s.db --webhook".split()
    with server(lambda one: one.send_response(500, "\x1b]0;owned\x07") or one.end_headers()) as url:
        said = forked_cli.run(*start, url).stderr
    assert "The webhook of the roll-out of m did not accept" in said
    assert UNSAFE_CHARACTERS.search(said.replace("\n", "")) is None


def test_a_new_key_prints_nothing_that_a_terminal_obeys() -> None:
    fields = dict.fromkeys(("id", "prefix", "tenant", "user", "state", "name", "tier"), ESCAPE)
    times = {"created_at": "2026-01-01T00:00:00Z", "expires_at": None, "revoked_at": None, "previous_until": None}
    limits = {"rpm": 1, "tpm": None, "concurrent": None, "budget": None}
    key = fields | times | limits | {"scopes": [ESCAPE], "models": [ESCAPE], "key": f"sk-llmops-{ESCAPE}"}
    with server(lambda one: reply(one, json.dumps(key).encode())) as url:
        assert "owned" in run("key create --tenant a --user a@b.example --url URL", url)


def test_a_page_of_a_hundred_thousand_models_is_refused() -> None:
    """Before the fix, `llmops top` took 709 MiB and more than 45 s for 4 MiB of metrics."""
    page = "".join(f'llmops_active_streams{{model="m{at}"}} 1\n' for at in range(100_000))
    with pytest.raises(ValueError, match="more than 50,000 lines"):
        MetricsPage(page, 0.0)


def test_top_keeps_few_pages_however_often_it_looks() -> None:
    """Before the fix, looks each half second at pages of 2 MB took 560 MB."""
    recent = MetricsWindow(15.0)
    for look in range(200):
        recent.add(MetricsPage("", look / 2))
        assert len(recent._pages) <= MAX_PAGES + 3
    assert recent.seconds == pytest.approx(15, abs=15 / MAX_PAGES)


def test_top_keeps_no_series_that_it_does_not_show() -> None:
    """Before the fix, pages of ever new names took 396 MB."""
    page = MetricsPage('a{b="c"} 1\nllmops_active_streams{model="m"} 2\nllm_ttft_seconds_sum 3\n', 0.0)
    assert [*page.series("a")] == []
    assert [*page.series("llm_ttft_seconds_sum")] == [({}, 3.0)]
    assert [*page.series("llmops_active_streams")] == [({"model": "m"}, 2.0)]


def test_a_sample_of_a_hundred_thousand_labels_is_refused() -> None:
    """The work of the parser grows with the square of the labels: 13 s of CPU."""
    labels = ",".join(f'l{number}="x"' for number in range(100_000))
    with pytest.raises(ValueError, match="more than 8,192 characters"):
        MetricsPage(f"llmops_active_streams{{{labels}}} 1\n", 0.0)


ODD_MODELS = (b"[" * 100_000, b'{"data": [{"id": 5}]}', b'{"data": [{"id": "m", "ready": {"a": 1}}]}')


@pytest.mark.parametrize("answer", [endless, *(partial(reply, body=body) for body in ODD_MODELS)])
async def test_a_gateway_that_answers_control_with_anything_is_unavailable(answer: Answer) -> None:
    """Before the fix, such a list of models was a 500 of control, which took all of a limit of 1 GiB."""
    with server(answer) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(UnavailableError):
                await models_api._list_models(client, HttpRequest({"type": "http", "headers": []}))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "x"])
async def test_an_engine_that_serves_no_number_of_tokens_is_unreadable(value: str) -> None:
    page = f'{SERVED_TOKENS_METRIC}_sum{{model="m"}} {value}\n'
    with server(lambda one: reply(one, page.encode(), "text/plain")) as url, pytest.raises(ResourceError):
        await served_tokens([f"{url}/metrics"])


class HostileTriton(grpc.GenericRpcHandler):
    """A Triton that describes its model with `card`, and whose streams never end."""

    def __init__(self, card: str) -> None:
        self._card = card

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        written = {"response_serializer": lambda message: message.SerializeToString()}
        if details.method.endswith("/ModelConfig"):
            return grpc.unary_unary_rpc_method_handler(self._config, pb.ModelConfigRequest.FromString, **written)
        return grpc.stream_stream_rpc_method_handler(self._stream, pb.ModelInferRequest.FromString, **written)

    async def _config(self, *_: object) -> pb.ModelConfigResponse:
        found = pb.ModelConfigResponse()
        found.config.parameters[contract.METADATA_PARAMETER].string_value = self._card
        return found

    async def _stream(self, *_: object) -> AsyncIterator[pb.ModelStreamInferResponse]:
        while True:
            response = pb.ModelStreamInferResponse()
            response.infer_response.outputs.add(name=contract.OUTPUT_IDS.name, datatype="INT32", shape=[1, 1, 1])
            response.infer_response.raw_output_contents.append(b"\1\0\0\0\2")
            yield response


@asynccontextmanager
async def bench_client(card: str) -> AsyncIterator[TritonBenchClient]:
    triton = grpc.aio.server()
    triton.add_generic_rpc_handlers([HostileTriton(card)])
    port = triton.add_insecure_port("127.0.0.1:0")
    await triton.start()
    client = TritonBenchClient(f"127.0.0.1:{port}", "m", RequestOptions())
    yield client
    await client.close()
    await triton.stop(None)


@pytest.mark.parametrize("card", ["[1]", "5", "[" * 200_000, "x"])
async def test_a_triton_that_describes_its_model_with_anything_is_one_sentence(card: str) -> None:
    """Before the fix, `llmops bench grpc://…` ended with a traceback."""
    async with bench_client(card) as client:
        with pytest.raises(ServerError, match="does not describe m-tensorrt_llm"):
            await client.read_metadata()


async def test_bench_leaves_an_answer_that_never_ends() -> None:
    """Before the fix, such an answer went on for the ten minutes of `--timeout`, and took memory for each token."""
    async with bench_client("{}") as client:
        record = await client.send(Request(max_tokens=4, prompt=[1], keep_text=True))
    assert record.error == "too many tokens"
