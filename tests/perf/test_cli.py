"""`llmops bench` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from tests.support.delay_server import Delays, DelayServer
from tests.support.forked_cli import run
from tests.support.pages import Page, PageServer
from tests.support.waiting import wait_until

LLMOPS = Path(sys.executable).parent / "llmops"


@contextmanager
def delay_server(**delays):
    """The server in a thread with a loop of its own; yields it."""
    with (
        start_blocking_portal(backend_options={"use_uvloop": True}) as portal,
        portal.wrap_async_context_manager(DelayServer(Delays(**delays))) as server,
    ):
        yield server


bench = partial(run, "bench")


def test_a_run_writes_json_and_a_page_that_compare_reads(tmp_path):
    with delay_server(ttft=0.02, itl=0.002) as server:
        for name in ("a", "b"):
            files = ["--json", tmp_path / f"{name}.json", "--html", tmp_path / f"{name}.html"]
            result = bench(server.url, "-c", 4, "-n", 12, "-o", 8, "--slo", "ttft:500ms", *files)
            assert result.returncode == 0, result.stderr
    assert "TTFT" in result.stdout
    assert "100.0 %" in result.stdout
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["summary"]["completed"] == len(data["records"]) == 12
    assert data["options"]["model"] == "delay"
    compared = bench("--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert compared.returncode == 0
    assert "TTFT p50" in compared.stdout


@pytest.mark.parametrize(("load", "most"), [((), 4), (("-r", 1000), 16), (("-r", 1000, "-c", 2), 2)])
def test_concurrency_is_four_and_bounds_an_open_loop(load, most):
    with delay_server(ttft=0.5, itl=0) as server:
        assert bench(server.url, "-n", 16, "-o", 1, "--warmup", 0, *load).returncode == 0
        times = [(one.read, one.sent[0]) for one in server.served]
    assert max(sum(read <= at < sent for read, sent in times) for at, _ in times) == most


def test_the_request_body_is_what_the_options_say():
    with delay_server(ttft=0, itl=0) as server:
        options = ["--extra", '{"temperature": 0}', "-o", 5, "-n", 1, "--warmup", 0, "--tools", 2]
        assert bench(server.url, *options).returncode == 0
        body = server.served[0].body
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 5, True)
    assert len(body["tools"]) == 2


def test_secrets_stay_out_of_the_report(tmp_path):
    with delay_server(ttft=0, itl=0) as server:
        options = ["-H", "X-Token: hidden", "-n", 1, "--json", tmp_path / "r.json"]
        assert bench(server.url, *options, env={**os.environ, "LLMOPS_API_KEY": "sk-secret"}).returncode == 0
    text = (tmp_path / "r.json").read_text()
    assert "sk-secret" not in text
    assert "hidden" not in text


NOBODY = ["http://127.0.0.1:1/v1", "-m", "m"]
NO_COLON = (
    "The objective 'ttft' has no colon; write METRIC:DURATION, as in ttft:200ms, ttft_p99:700ms or availability:99.9%."
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x/v1", "-m", "m"], "URL ftp://x/v1 is not an HTTP URL ("),
        ([*NOBODY, "--sweep"], "give at least one --slo"),
        ([*NOBODY, "-i", "lots"], "Length 'lots' is invalid"),
        ([*NOBODY, "--slo", "ttft"], NO_COLON),
        ([*NOBODY, "--extra", "[1]"], "--extra [1] is not a JSON object; write a JSON object in single quotes"),
        ([*NOBODY, "--json", "/nowhere/at/all.json"], "directory); create the folder first"),
        ([*NOBODY, "--trace", "/nowhere.jsonl"], "cannot be read"),
        ([*NOBODY, "--via", "engine"], "does not fit http://127.0.0.1:1/v1"),
        ([*NOBODY, "--json", "/"], "cannot be written (Is a directory); name a file in it"),
        ([*NOBODY, "--tools", 2, "--prompts", "p"], "--tools apply only to generated prompts"),
        ([*NOBODY, "--cancel", 0.1, "--trace", "t"], "--cancel apply only to generated prompts"),
        (["--compare", "/nowhere/a.json", "/nowhere/b.json"], "cannot be read"),
        ([*NOBODY, "-d", "60"], "60 has no unit; write 60ms or 60s."),
        ([*NOBODY, "--timeout", "0s"], "it must be above zero; see `llmops bench --help`."),
        ([*NOBODY, "--think-time", "soon"], "'soon' is not a duration; write 500ms or 0.5s."),
        (
            [*NOBODY, "--slo", "ttft:500"],
            "The objective 'ttft:500' is not usable: 500 has no unit; write 500ms or 500s",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, message):
    result = bench(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert (len(result.stderr.strip().splitlines()), result.stdout) == (1, "")


@pytest.mark.parametrize(("objective", "code"), [("ttft:9s", 0), ("ttft:20ms", 1)])
def test_objectives_that_are_missed_are_the_exit_code(objective, code):
    with delay_server(ttft=0.1, itl=0) as server:
        result = bench(server.url, "-n", 3, "-o", 2, "--slo", objective)
        assert result.returncode == code
        missed = "Error: 0.0 % of the requests met ttft:20ms, and --fail-under asks for 99 %; lower the load"
        assert (missed in result.stderr) == bool(code)
        assert bench(server.url, "-n", 3, "-o", 2, "--slo", objective, "--fail-under", 0).returncode == 0


def test_an_address_without_its_v1():
    with PageServer(lambda _: Page(status=404)) as server:
        result, base = bench(server.url), server.url
    assert result.returncode == 1
    assert result.stderr == f"Error: {base} does not exist on the server; check the URL. Did you mean {base}/v1?\n"


def test_a_server_that_is_not_there_is_said_before_the_load():
    result = bench("http://127.0.0.1:1/v1", "-m", "m", "-n", 1000)
    assert result.returncode == 1
    assert "warm-up requests" in result.stderr
    assert "connect" in result.stderr


def test_ctrl_c_ends_a_run_at_once_and_writes_nothing(tmp_path):
    with delay_server(ttft=0.05, itl=0.05) as server:
        command = [str(LLMOPS), "bench", server.url, "-d", "60s", "-c", "4", "--json", str(tmp_path / "r.json")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: len(server.served) >= 6)
        os.kill(child.pid, signal.SIGINT)
        _, stderr = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []
