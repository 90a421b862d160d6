"""The one call that makes all checks on a GPU, with a stand-in for the command line."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmops.perf import gpu_checks

ROOT = Path(__file__).parents[2]
# a command line whose `verify` fails when asked to, whose `up` is a server and whose `bench` writes a rate
PROGRAM = """
import http.server, json, os, pathlib, sys
command, *rest = sys.argv[1:]
print(command, *rest)
if command == "verify" and os.environ.get("VERIFY_FAILS"):
    sys.exit(1)
if command == "bench":
    rate = {"summary": {"output_tokens_per_second": 4418.0}}
    pathlib.Path(rest[rest.index("--json") + 1]).write_text(json.dumps(rate))
if command == "up":
    if os.environ.get("UP_FAILS"):
        sys.exit("no GPU")
    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "tiny"}]}')
    http.server.HTTPServer(("127.0.0.1", int(rest[rest.index("--port") + 1])), Models).serve_forever()
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(gpu_checks, "LLMOPS", (sys.executable, str(program)))
    engine = tmp_path / "engine"
    engine.mkdir()
    manifest = json.loads((ROOT / "tests/build/data/engines/pytorch.json").read_text())
    (engine / "engine.json").write_text(json.dumps({**manifest, "parallelism": {"tp_size": 2}}))

    def run(*options: str):
        report = tmp_path / "report"
        result = CliRunner().invoke(gpu_checks.main, [str(engine), "-o", str(report), *options])
        rows = json.loads((report / "summary.json").read_text()) if report.is_dir() else []
        return result, {row["name"]: row for row in rows}

    return run


def test_every_step_leaves_its_output_and_the_rate_is_compared(check, tmp_path):
    result, rows = check("--recipe", "llama-3.3-70b", "--against", "source")
    assert result.exit_code == 0, result.output
    assert [*rows] == ["doctor", "deep doctor", "quantised layers", "verify", "serve", "bench", "throughput"]
    assert rows["throughput"]["detail"].startswith("2,209 output tokens/s per GPU, 1.00 of the published 2,209 (H100")
    assert "-i 1000 -o 1000" in (tmp_path / "report" / rows["bench"]["file"]).read_text()


def test_a_step_that_fails_leaves_the_others(check, monkeypatch):
    monkeypatch.setenv("VERIFY_FAILS", "1")
    result, rows = check()
    assert result.exit_code == 1
    assert [name for name, row in rows.items() if not row["ok"]] == ["verify"]
    assert "quantised layers" not in rows
    assert "published" not in rows["throughput"]["detail"]


def test_an_unknown_recipe_is_one_sentence(check):
    result, rows = check("--recipe", "llama-3.3-70c")
    assert (result.exit_code, rows) == (1, {})
    assert "did you mean llama-3.3-70b?" in result.output
