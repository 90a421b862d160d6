"""`llmops up` as a user runs it: one command, one answer, one Ctrl-C, nothing left."""

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmops.cli.stack import MAX_RESTARTS, Ready, Stack
from llmops.cli.up import DEMO_TOKENS, _announce, command
from llmops.errors import InputError, ResourceError, ServerError
from tests.model_repository.test_launch import echo_repository
from tests.model_repository.test_multi_gpu import engine, marker
from tests.support import forked_cli
from tests.support.live_process import LLMOPS, LiveProcess
from tests.support.nvidia_smi import install_nvidia_smi
from tests.support.processes import descendants, runs
from tests.support.servers import free_port, refuses
from tests.support.waiting import GENEROUS, wait_until

pytestmark = pytest.mark.xdist_group("own-triton")


class Up(LiveProcess):
    """A running `llmops up`; its stdout goes to a file, as a service manager would have it."""

    def __init__(self, engine: Path, folder: Path) -> None:
        super().__init__([*LLMOPS, "up", str(engine), "--port", "0", "--dir", str(folder)], folder / "up.log")

    def wait_ready(self) -> str:
        return self.found(r"Ready after \d+ s: (http://\S+)/v1 serves (?:smollm2|tiny)")

    def stream(self, url: str, tokens: int, model: str = "tiny") -> Iterator[dict]:
        """The events of a completion, as they come."""
        body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=GENEROUS) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def children(self) -> list[int]:
        """Pids of all processes under this one: tritonserver and its stubs."""
        return descendants(self.process.pid)[1:]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Path], Up]]:
    started: list[Up] = []

    def start(engine: Path) -> Up:
        started.append(Up(engine, tmp_path))
        return started[-1]

    yield start
    for running in started:
        running.kill()


def test_one_command_one_answer_and_a_stop_lets_another_come_to_its_end(start, engine_dir: Path) -> None:
    up = start(engine_dir)
    url = up.wait_ready()
    said = f"The gateway {url} is open to this machine only, without a key; --host opens it to others.\nTriton's gRPC "
    assert said in up.log
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smollm2", "temperature": 0, "max_tokens": 20, "messages": [question]}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=GENEROUS) as answer:
        message = json.load(answer)["choices"][0]["message"]["content"]
    assert message == "The capital of France is Paris."

    children = up.children()
    assert len(children) >= 4  # tritonserver and a stub for each Python model
    segments = set(Path("/dev/shm").glob(f"*llmops_{up.process.pid}_*"))
    assert segments
    events = up.stream(url, 60, "smollm2")
    next(events)
    up.process.send_signal(signal.SIGTERM)
    assert list(events)[-1]["usage"]["completion_tokens"] == 60
    assert up.process.wait(GENEROUS) == 0, up.log
    # killed ones are there until the system has reaped them
    wait_until(lambda: not any(runs(pid) for pid in children))
    assert [path for path in segments if path.exists()] == []


def test_a_second_signal_waits_for_nothing(start, tiny_engine: Path, monkeypatch) -> None:
    # else its answers would be waited for, for longer than this test may take
    monkeypatch.setenv("LLMOPS_TIMEOUTS__DRAIN", "10000s")
    up = start(tiny_engine)
    url = up.wait_ready()
    events = up.stream(url, 8000)
    next(events)
    children = up.children()
    up.process.send_signal(signal.SIGTERM)
    # the gateway is done with its first signal when it takes no connection any more
    port = int(url.rsplit(":", 1)[1])
    wait_until(lambda: refuses(port))
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(GENEROUS) is not None
    # killed ones are there until the system has reaped them
    wait_until(lambda: not any(runs(pid) for pid in children))
    assert list(Path("/dev/shm").glob(f"*llmops_{up.process.pid}_*")) == []


def test_a_models_process_that_ends_is_started_again_and_ctrl_c_ends_all(start, tiny_engine: Path) -> None:
    """Triton itself would go on, say that the model is ready, and let every request to it wait."""
    up = start(tiny_engine)
    url = up.wait_ready()
    next(up.stream(url, 4000))
    commands = {pid: Path("/proc", str(pid), "cmdline").read_text() for pid in up.children()}
    engine = next(pid for pid, text in commands.items() if "tiny-tensorrt_llm/1/model.py" in text)
    os.kill(engine, signal.SIGKILL)
    # Triton itself aborts now and then, at a lock that the process held
    killed = "A process of model tiny-tensorrt_llm ended unexpectedly|when a process of a model is killed"
    up.found(f"(?:{killed}).* (Starting it again)")

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return list(up.stream(url, 4))[-1]["usage"]["completion_tokens"] == 4
        return False

    wait_until(answers)
    # of the first Triton's processes none is left, though their exit codes may not be collected
    assert [pid for pid in commands if runs(pid)] == []
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(GENEROUS) == 0, up.log
    assert list(Path("/dev/shm").glob(f"*llmops_{up.process.pid}_*")) == []


class BrokenTriton:
    """A Triton that ends as soon as it is ready."""

    starts = 1

    def wait(self, stop: threading.Event, sources: object) -> None:
        raise ServerError("Triton ended unexpectedly with code -9.")

    def restart(self) -> None:
        self.starts += 1

    def wait_ready(self, cancelled: threading.Event) -> None: ...

    def stop(self, timeout: float | None = None) -> None: ...


def test_a_crash_loop_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    stack, triton = Stack("127.0.0.1", 0, None, None, None), BrokenTriton()
    stack._tritons[triton], stack._running = threading.Event(), 1  # type: ignore[index]
    stack._watch(triton)  # type: ignore[arg-type]
    assert triton.starts == MAX_RESTARTS + 1
    assert capsys.readouterr().err.count("Starting it again.") == MAX_RESTARTS
    assert raised == [signal.SIGTERM]
    assert "It was started 4 times within 10 minutes, so it is not started again." in str(stack._failure)


def test_replicas_get_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(monkeypatch, tmp_path, gpus=4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    repository = echo_repository(tmp_path)
    marker(echo=engine(2, backend="python", directory=str(tmp_path))).save(repository)
    with Stack("127.0.0.1", 0, None, None, None) as stack:
        said = r"^3 replicas need 6 GPUs, 2 each, but this machine has 4: start fewer"
        with pytest.raises(ResourceError, match=said):
            stack.start_tritons(repository, 3)
        stack.start_tritons(repository, 2)
        environments = [Path(f"/proc/{triton.pid}/environ").read_text().split("\0") for triton in stack._tritons]
    visible = [next(one for one in found if one.startswith("CUDA_VISIBLE_DEVICES=")) for found in environments]
    assert visible == ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"]


def test_a_taken_port_is_known_before_anything_is_built(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = forked_cli.run("up", "--port", port, "--dir", tmp_path / "x")
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert not (tmp_path / "x").exists()


def test_a_wrong_store_and_a_wrong_filter_are_known_before_anything_is_built(tmp_path: Path) -> None:
    for open_ in (None, True):
        with pytest.raises(InputError, match="The store cannot be foo"):
            Stack("127.0.0.1", 0, None, "foo://x", open_)
    config = tmp_path / "gateway.yaml"
    config.write_text("safety: {filters: {mine: {kind: rules, patterns: ['(']}}}\n")
    with pytest.raises(InputError, match="mine"):
        Stack("127.0.0.1", 0, config, None, None)


def test_an_engine_folder_is_served_under_the_given_name(tiny_engine: Path, tmp_path: Path, monkeypatch) -> None:
    served: list[str] = []
    for name in ("start_tritons", "start_versions"):
        monkeypatch.setattr(Stack, name, lambda *_: None)
    monkeypatch.setattr(Stack, "run_gateway", lambda self, models, on_ready: served.extend(models))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command.main([str(tiny_engine), "--name", "mine", "--port", "0", "--dir", str(tmp_path)], standalone_mode=False)
    assert served == ["mine"]
    assert next(tmp_path.glob("*-repository/mine/config.pbtxt")).is_file()


@pytest.mark.parametrize(("kind", "path"), [("openvino", "chat/completions"), ("encoder", "embeddings")])
def test_the_request_to_try_is_one_that_the_model_can_answer(kind, path, tmp_path: Path, capsys) -> None:
    shutil.copy(f"tests/build/data/engines/{kind}.json", tmp_path / "engine.json")
    _announce(Ready("http://127.0.0.1:9000", ["mine"], "", False), tmp_path, 1.0)
    shown = capsys.readouterr().out
    assert f"/v1/{path} " in shown
    assert ("llmops chat" in shown) == (kind == "openvino")
    assert json.loads(shown.split("-d '")[1].split("'")[0])["model"] == "mine"


# -- Tests of the settings that `llmops up` gives its gateway


@pytest.fixture
def port() -> int:
    return free_port()


def settings(port: int | None = None, config: Path | None = None, max_tokens: int | None = None):
    return Stack(None, port, config, None, None, max_tokens)._settings


def test_the_port_comes_from_the_flag_the_environment_and_the_file_in_this_order(port, tmp_path, monkeypatch):
    config = tmp_path / "gateway.yaml"
    config.write_text(f"port: {port}\n")
    assert settings(config=config).port == port
    monkeypatch.setenv("LLMOPS_PORT", str(port + 1))
    assert settings(config=config).port == port + 1
    assert settings(port=0, config=config).port == 0


def test_the_demo_limits_answers_that_name_no_limit_unless_the_settings_do(port, tmp_path):
    config = tmp_path / "gateway.yaml"
    config.write_text(f"port: {port}\nsampling: {{max_tokens: 77}}\n")
    assert settings(port, max_tokens=DEMO_TOKENS).sampling.max_tokens == 512
    assert settings(port).sampling.max_tokens is None
    assert settings(port, config, DEMO_TOKENS).sampling.max_tokens == 77
