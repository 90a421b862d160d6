"""`llmops top`: exact numbers from pages that are made up, the terminal as it was, and nobody there."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from llmops.cli.main import cli
from llmops.cli.monitor.exposition import MetricsPage, MetricsWindow
from llmops.cli.monitor.layout import render_screen
from llmops.cli.monitor.snapshot import PolledGateway, WorkerStates, make_snapshot
from tests.support.pages import Page, PageServer, Request

WINDOW = 15.0


def metrics(
    good: int = 0, late: int = 0, aborted: int = 0, ttft: tuple[int, ...] = (), waiting: int = 0, active: int = 0
) -> str:
    """A page of a gateway with the model `m`; `ttft`: answers in the buckets up to 0.1, 0.5 and any number of s."""
    lines = [
        f'llmops_answers_total{{model="m",outcome="good"}} {good}',
        f'llmops_answers_total{{model="m",outcome="late"}} {late}',
        f'llmops_answers_total{{model="m",outcome="aborted"}} {aborted}',
        f'llmops_answers_total{{model="m",outcome="failed"}} {late}',
        f'llmops_prompt_tokens_total{{model="m"}} {100 * good}',
        f'llmops_completion_tokens_total{{model="m"}} {20 * good}',
        f'llmops_prefix_lookup_tokens_total{{model="m"}} {100 * good}',
        f'llmops_prefix_cached_tokens_total{{model="m"}} {60 * good}',
        f'llm_queue_depth{{model="m",priority="default"}} {waiting}',
        f'llm_queue_depth{{model="m",priority="batch"}} {2 * waiting}',
        f'llmops_active_streams{{model="m"}} {active}',
        f'llmops_requests_total{{route="/v1/x",status="200"}} {good}',
        f'llmops_requests_total{{route="/v1/x",status="429"}} {late}',
        f'llmops_requests_total{{route="/v1/y",status="429"}} {late}',
        f"llmops_event_loop_blocked_seconds_total {good / 1000}",
        f"process_resident_memory_bytes {300 * 2**20}",
        'llmops_replicas{model="m",state="ready"} 2',
        'llmops_replicas{model="m",state="gone"} 1',
        'llmops_replicas{model="m",state="suspect"} 0',
        'llmops_server_reachable{server="gpu-1:8001"} 1',
    ]
    running = 0
    for bound, count in zip(("0.1", "0.5", "+Inf"), ttft or (0, 0, 0), strict=True):
        running += count
        lines.append(f'llm_ttft_seconds_bucket{{model="m",le="{bound}"}} {running}')
    return "\n".join(lines) + "\n"


def recent(*pages: tuple[float, str], window: float = WINDOW) -> MetricsWindow:
    found = MetricsWindow(window)
    for at, text in pages:
        found.add(MetricsPage(text, at))
    return found


def model(*gateways: PolledGateway):
    (row,) = make_snapshot(gateways, {}).models
    return row


def test_rates_are_what_was_counted_between_two_looks():
    before, after = metrics(good=100, late=10, aborted=7), metrics(good=190, late=20, aborted=17, waiting=3, active=5)
    row = model(PolledGateway("a", recent((50.0, before), (60.0, after))))
    # 90 good, 10 late and 10 failed, 10 whose client left, in 10 s
    assert (row.requests_per_s, row.goodput) == (12.0, 90 / 110)
    assert (row.failed_per_s, row.shed_per_s, row.aborted_per_s) == (1.0, 0.0, 1.0)
    assert (row.tokens_in_per_s, row.tokens_out_per_s) == (900.0, 180.0)
    assert row.prefix_hit_rate == 0.6
    assert (row.running, dict(row.waiting)) == (5.0, {"default": 3.0, "batch": 6.0})
    assert (row.ready, row.replicas) == (2, 3)


def test_quantiles_are_of_the_answers_between_two_looks():
    row = model(PolledGateway("a", recent((0.0, metrics(ttft=(5, 5, 0))), (10.0, metrics(ttft=(15, 15, 0))))))
    # 10 up to 0.1 s and 10 from there to 0.5 s: evenly spread
    quantiles = (pytest.approx(0.1), pytest.approx(0.1 + 0.4 * 0.9), None)
    assert (row.ttft_p50_s, row.ttft_p95_s, row.tpot_p95_ms) == quantiles


def test_gateways_add_up_whatever_they_counted_before_and_however_long_they_were_watched():
    one = PolledGateway("a", recent((0.0, metrics(good=1000)), (10.0, metrics(good=1100, active=2, waiting=1))))
    other = PolledGateway("b", recent((5.0, metrics(good=7)), (10.0, metrics(good=17, active=3))))
    found = make_snapshot([one, other], {})
    (row,) = found.models
    assert (row.requests_per_s, row.running, row.waiting["batch"]) == (12.0, 5.0, 2.0)
    # both see the same replicas
    assert (row.ready, row.replicas) == (2, 3)
    assert [gateway.requests_per_s for gateway in found.gateways] == [10.0, 2.0]
    assert found.seconds == 10.0


def test_without_two_looks_there_are_no_rates_and_without_traffic_no_shares():
    first = model(PolledGateway("a", recent((0.0, metrics(good=10, active=1)))))
    assert (first.requests_per_s, first.goodput, first.ttft_p95_s, first.running) == (None, None, None, 1.0)
    idle = model(PolledGateway("a", recent((0.0, metrics(good=10)), (2.0, metrics(good=10)))))
    assert (idle.requests_per_s, idle.goodput, idle.prefix_hit_rate, idle.ttft_p95_s) == (0.0, None, None, None)


def test_a_gateway_says_what_it_refused_and_how_it_is():
    asked = PolledGateway("a", recent((0.0, metrics()), (10.0, metrics(good=40, late=5, active=4))))
    (gateway,) = make_snapshot([asked], {}).gateways
    assert (gateway.requests_per_s, dict(gateway.refused_per_s)) == (5.0, {"429": 1.0})
    assert (gateway.streams, gateway.loop_held, gateway.memory_bytes) == (4.0, 0.004, 300 * 2**20)


def belief(replica: str, heard: float | None, state: str = "ready", **more: object) -> dict:
    blocks = {"kv_blocks_free": 25, "kv_blocks": 100}
    return {"replica": replica, "state": state, "last_update_seconds_ago": heard, "problem": "", **blocks, **more}


def states(worker: str, **models: list[dict]) -> WorkerStates:
    return WorkerStates.model_validate({"gateway": worker, "models": models})


def test_a_replica_is_as_the_gateway_believes_that_heard_of_it_last():
    worker = states("a/1", m=[belief("gpu-1:8001", 4.0, "suspect", running=1, own=3)])
    other = states("b/2", m=[belief("gpu-1:8001", 0.2, running=9, waiting=2, own=4, step_ms=31.5)])
    third = states("c/3", m=[belief("gpu-1:8001", None, "starting"), belief("gpu-2:8001", None)])
    first = PolledGateway("x", recent((0.0, metrics())), states=[worker, other])
    asked = [first, PolledGateway("y", recent(), states=[third])]
    found = make_snapshot(asked, {"gpu-9:8002": recent((0.0, ENGINE))})
    first, second = found.replicas
    assert (first.replica, first.state, first.doubts, first.running, first.waiting) == ("gpu-1:8001", "ready", 2, 9, 2)
    assert (first.kv_use, first.step_ms, first.own) == (0.75, 31.5, 7)
    assert (second.replica, second.state, second.last_update_seconds_ago) == ("gpu-2:8001", "ready", None)
    (row,) = found.models
    assert (row.kv_use, row.batch) == (0.75, 9)


ENGINE = """
nv_trt_llm_request_metrics{model="m-tensorrt_llm",version="1",request_type="active"} 12
nv_trt_llm_request_metrics{model="m-tensorrt_llm",version="1",request_type="scheduled"} 10
nv_trt_llm_request_metrics{model="m-tensorrt_llm",version="1",request_type="waiting"} 3
nv_trt_llm_kv_cache_block_metrics{model="m-tensorrt_llm",version="1",kv_cache_block_type="fraction"} 0.93
"""


def drawn(found, width: int = 200, height: int | None = None) -> list[str]:
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as taken:
        console.print(render_screen(found, width, height))
    return [line.rstrip() for line in taken.get().splitlines()]


def several():
    """Models `a`, with the most requests, and `b`, with the most that wait; forty replicas."""
    before = metrics(good=1).replace('"m"', '"a"') + metrics().replace('"m"', '"b"')
    after = metrics(good=101).replace('"m"', '"a"') + metrics(good=10, late=10, waiting=9).replace('"m"', '"b"')
    lines = [belief(f"gpu-{at:02}:8001", 0.1, "gone" if at == 7 else "ready") for at in range(40)]
    polled = PolledGateway("http://x", recent((0.0, before), (10.0, after)), states=[states("a/1", a=lines)])
    return make_snapshot([polled], {})


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_screen_is_no_wider_and_no_longer_than_the_terminal(width):
    lines = drawn(several(), width=width, height=24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    # nothing of what is shown is cut but the first line
    assert not any("…" in line and "more replicas" not in line for line in lines[1:])
    replicas = [line for line in lines if "gpu-" in line]
    # the one in trouble is the first of them
    assert replicas[0].startswith("gpu-07:8001")
    assert f"… and {40 - len(replicas)} more replicas" in lines


class Gateway:
    """Answers /metrics and /replicas with what it was told."""

    def __init__(self) -> None:
        self.page, self.workers, self.keys = metrics(), None, []
        self.server = PageServer(self.answer)
        self.url = self.server.url

    def answer(self, request: Request) -> Page:
        self.keys.append(request.headers.get("authorization"))
        text = self.page if request.path == "/metrics" else self.states()
        return Page(text or "", 404 if text is None else 200)

    def states(self) -> str | None:
        return None if self.workers is None else json.dumps({"gateways": self.workers()})


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    one = Gateway()
    yield one
    one.server.server_close()


def top(*arguments: str):
    return CliRunner().invoke(cli, ["top", "--interval", "0.1s", *arguments], env={"LLMOPS_API_KEY": "sk-1"})


def test_scripts_get_json_and_a_gateway_that_is_away_is_a_line(gateway):
    gone = "http://127.0.0.1:1"
    done = top("--once", "--json", "--url", gateway.url, "--url", gone)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [(one["url"], one["problem"]) for one in found["gateways"]] == [
        (gateway.url, ""), (gone, "nothing answers there"),
    ]  # fmt: skip
    assert (found["models"][0]["model"], found["models"][0]["requests_per_s"]) == ("m", 0.0)
    assert set(gateway.keys) == {"Bearer sk-1"}
    done = top("--once", "--url", gateway.url + "/v1", "--url", gone)
    assert "1 away" in done.output
    assert f"{gone}  nothing answers there" in done.output


def test_a_password_of_a_url_is_not_shown(gateway):
    secret = [url.replace("//", "//ann:pass@") for url in (gateway.url, "http://127.0.0.1:1")]
    shown = top("--once", "--url", secret[0], "--url", secret[1]).output
    assert gateway.url in shown
    assert "pass" not in shown


def test_nobody_there_is_an_exit_code():
    done = top("--once", "--url", "http://127.0.0.1:1", "--url", "dns:nobody.invalid:9000")
    assert done.exit_code == 1
    assert "dns:nobody.invalid:9000  DNS: " in done.output


@pytest.mark.parametrize(
    ("page", "problem"),
    [("<html>not metrics</html>", "does not answer like a gateway of llmops"), (None, "answers 404 to /metrics")],
)
def test_what_is_no_gateway_is_said(gateway, page, problem):
    gateway.page = page
    assert problem in top("--once", "--url", gateway.url).output


class Terminal:
    """`llmops top` in a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.seen = b""
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        command = [sys.executable, "-m", "llmops.cli", "top", "--url", url, "--interval", "0.2s"]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "30"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        self.process = subprocess.Popen(command, **streams, env=env, start_new_session=True)

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], 120)
            assert ready, self.seen
            self.seen += os.read(self.master, 65536)

    def end(self) -> int:
        code = self.process.wait(60)
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536)
        return code


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_left_as_it_was(gateway, way):
    terminal = Terminal(gateway.url)
    try:
        terminal.until(b"rates over")
        assert b"\x1b[?1049h" in terminal.seen
        gateway.server.server_close()
        terminal.until(b"nothing answers there")
        terminal.process.send_signal(way)
        assert terminal.end() == 0
        # the other screen and the cursor are back, and so is what the terminal does with keys
        assert terminal.seen.rindex(b"\x1b[?1049l") > terminal.seen.rindex(b"\x1b[?1049h")
        assert terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert b"Traceback" not in terminal.seen
    finally:
        terminal.process.kill()
        terminal.process.wait(60)
        os.close(terminal.master)
        os.close(terminal.slave)


def test_without_a_terminal_tables_follow_one_another_until_nobody_reads(gateway):
    command = [sys.executable, "-m", "llmops.cli", "top", "--url", gateway.url, "--interval", "0.1s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = ""
        while seen.count("rates over") < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            seen += line
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (1, "")
    assert "\x1b" not in seen
    assert seen.count("MODEL  READY") >= 2
