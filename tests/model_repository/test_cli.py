"""`llmops repo`, `serve` and `doctor` as a user runs them."""

import json
import re
import signal
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from llmops.cli import serve
from llmops.cli.main import cli
from llmops.model_repository.doctor import image, machine
from llmops.model_repository.server import installation
from tests.model_repository.test_generate import make_engine
from tests.model_repository.test_launch import echo_repository
from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.nvidia_smi import install_nvidia_smi
from tests.support.processes import descendants, runs


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_repo_says_what_it_made_and_what_comes_next(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    engine = make_engine(tmp_path / "engine")
    result = run("repo", str(engine), f"again={engine}", "-o", str(tmp_path / "r"))
    assert result.exit_code == 0, result.output
    assert "8 Triton models" in result.output
    assert f"llmops serve {tmp_path / 'r'}" in result.output
    found = json.loads(run("repo", str(engine), "-o", str(tmp_path / "r"), "--json").output)
    assert found["served"] == ["tiny"]
    assert set(found["models"]) == {path.name for path in (tmp_path / "r").iterdir() if path.is_dir()}


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
def test_serve_says_when_it_is_ready_and_ends_on_sigterm(tmp_path: Path) -> None:
    ports = ["--http", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    serve = LiveProcess([*LLMOPS, "serve", str(echo_repository(tmp_path)), *ports], tmp_path / "log")
    url = serve.found(r"^Ready.* HTTP (http://[\d.:]+)")
    assert urllib.request.urlopen(f"{url}/v2/models/echo/ready", timeout=120).status == 200
    serve.found(
        r"(^Open to this machine only: gRPC, metrics and HTTP\. Metrics are closed by --no-metrics\. "
        r"HTTP is closed without --http\.$)"
    )
    below = descendants(serve.pid)[1:]
    assert below
    serve.process.send_signal(signal.SIGTERM)
    assert serve.process.wait(120) == 0
    assert not any(map(runs, below))


def test_serve_says_it_on_its_standard_output(capsys) -> None:
    serve._announce(SimpleNamespace(grpc_address="a:1", http_url="http://a:2", metrics_url="", exposure="Open."))
    told = "Ready. gRPC a:1, HTTP http://a:2\nOpen.\nServe OpenAI requests from it: llmops gateway --triton a:1\n"
    assert capsys.readouterr() == (told, "")


def test_doctor_is_content_with_a_machine_that_can_serve() -> None:
    pytest.importorskip("openvino_genai")
    checks = {check.name: check for check in machine.check_machine()}
    for name in ("Triton", "libpython", "Python backend stub", "extra embedded", "/dev/shm"):
        assert checks[name].status == "ok", checks[name]
    result = run("doctor", "--json")
    assert json.loads(result.output)["ok"] is (result.exit_code == 0)


def test_doctor_names_what_is_missing_and_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pytriton")
    monkeypatch.setattr(installation, "find_wheel", lambda: tmp_path)
    result = run("doctor")
    assert result.exit_code == 1
    assert re.search(r"not ok +Triton", result.output)
    assert "→ The Triton binary" in result.output


@pytest.mark.parametrize(("driver", "status"), [("590.44.01", "ok"), ("580.159.04", "note"), ("535.54.03", "note")])
def test_doctor_reads_the_gpu_and_its_driver(monkeypatch, tmp_path, driver, status):
    install_nvidia_smi(monkeypatch, tmp_path, driver=driver)
    checks = {check.name: check for check in machine.check_machine()}
    assert checks["GPU 0"].detail == "NVIDIA H200, 143771 MiB, compute capability 9.0"
    assert checks["NVIDIA driver"].status == status


@pytest.mark.parametrize(
    ("tag", "installed", "status", "text"),
    [
        ("26.07", "1.2.1", "ok", "targets: pytorch, tensorrt"),
        ("26.07", "1.0.0", "not ok", "should have TensorRT-LLM 1.2.1, but has 1.0.0"),
        ("26.07", None, "not ok", "without TensorRT-LLM"),
        ("30.01", None, "note", "tag 30.01"),
    ],
)
def test_doctor_holds_the_container_against_the_version_matrix(monkeypatch, tmp_path, tag, installed, status, text):
    monkeypatch.setattr(installation, "CONTAINER_ROOT", tmp_path)
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", tag)
    monkeypatch.setattr(image, "installed_version", lambda package: installed)
    check = next(check for check in machine.check_machine() if check.name == "container image")
    assert check.status == status
    assert text in check.detail
