"""An engine that ends while it is looked at: what was found until then is still reported."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mock_engine.repository import make_mock_engine
from tests.verify.conftest import pointing_at, triton_on

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]
FIRST = "input and output tensors"


def test_an_engine_that_ends_in_the_middle(engine_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    with triton_on(make_mock_engine(engine_dir, tmp_path / "repository")) as server:
        command = [sys.executable, "-m", "llmops.cli", "verify", *pointing_at(server), "--json", "--html", str(page)]
        with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            # the first check is done, and many are left
            while FIRST not in (line := running.stderr.readline()):
                assert line, "it ended without a check"
            os.killpg(server.pid, signal.SIGKILL)
            output, said = running.communicate(timeout=500)
    report = json.loads(output)
    first, *_, last = report["results"]
    assert running.returncode == 1
    assert (first["name"], first["verdict"]) == (FIRST, "works")
    assert last["verdict"] == "wrong"
    assert last["detail"].startswith(f"the engine at {server.grpc_address} ended during this check (")
    assert len(report["faults"]) == 1
    assert {one["part"] for one in report["results"]} == {"contract"}
    assert f"Fault: {report['faults'][0]}" in said
    assert "1 fault found." in page.read_text()
