"""Starting and stopping the real server: faults are made for real, and nothing outlives a stop."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llmops.errors import MissingDependencyError, ResourceError, ServerError
from llmops.model_repository.launch import Ports, TritonServer, start_triton
from llmops.model_repository.server import installation, model_processes
from llmops.model_repository.server.installation import PYTHON_VERSION, Installation, find_installation
from llmops.model_repository.server.shared_memory import SHM_DIR, remove_stale_segments
from llmops.model_repository.server.triton_log import (
    LogLine,
    explain_failure,
    last_error,
    parse_engine_death,
    parse_line,
)
from llmops.process import kill_survivors, read_process
from tests.support.engine_client import EngineClient
from tests.support.programs import write_program
from tests.support.waiting import GENEROUS, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

ANY = Ports(0, 0, 0)
ECHO = """
import triton_python_backend_utils as pb_utils
{top}

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        {execute}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
name: "echo" backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""


def echo_repository(root: Path, top: str = "", initialize: str = "pass", execute: str = "pass") -> Path:
    """A repository with one small Python model, so that a server starts in a second."""
    pytest.importorskip("pytriton")
    version = root / "repository" / "echo" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(ECHO.format(top=top, initialize=initialize, execute=execute))
    (version.parent / "config.pbtxt").write_text(CONFIG)
    return root / "repository"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return echo_repository(tmp_path)


def started(repository: Path, **options) -> TritonServer:
    """A server whose models are loaded."""
    server = start_triton(repository, ports=ANY, **options)
    server.wait_ready(120)
    return server


def processes(group: int) -> list[int]:
    """Living processes of a process group, the server's stubs among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def segments(server: TritonServer) -> list[Path]:
    return list(SHM_DIR.glob(f"{server.shm_prefix}*"))


def test_a_stop_leaves_no_process_and_no_shared_memory(repository: Path) -> None:
    server = started(repository)
    assert server.is_ready()
    assert len(processes(server.pid)) >= 2
    assert segments(server)
    assert (server.stop(), processes(server.pid), segments(server)) == (0, [], [])


def test_a_stub_that_hangs_is_ended_too(tmp_path: Path) -> None:
    repository = echo_repository(tmp_path, execute="import time; time.sleep(600)")
    server = started(repository, exit_timeout=1, http=True)
    with pytest.raises(TimeoutError):
        infer(server.http_url, timeout=0.5)
    server.stop()
    assert (processes(server.pid), segments(server)) == ([], [])


def infer(url: str, timeout: float = GENEROUS) -> bytes:
    body = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"INT32","data":[7]}]}'
    request = urllib.request.Request(f"{url}/v2/models/echo/infer", body)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.read()


@pytest.mark.parametrize("dies", [False, True], ids=["at a stop", "when the model has died"])
def test_workers_in_a_session_of_their_own_end_with_their_model(tmp_path: Path, dies: bool) -> None:
    """Open MPI puts the workers of TensorRT-LLM's LLM API into other process groups, where they outlived a killed
    parent and kept its GPU memory (ai-dynamo/dynamo #7122, NVIDIA/TensorRT-LLM #16404).
    """
    worker_pid = tmp_path / "pid"
    top = f"import subprocess, pathlib; PID = pathlib.Path({str(worker_pid)!r})"
    start = "PID.write_text(str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))"
    server = started(echo_repository(tmp_path, top, start))
    worker = read_process(int(worker_pid.read_text()))
    if dies:
        os.kill(worker.parent_pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="A process of model echo ended"):
            server.wait(threading.Event())
    assert worker.is_alive
    server.stop()
    try:
        wait_until(lambda: not worker.is_alive)
    finally:
        kill_survivors([worker])


#: Code of a model whose workers are below a daemon, as mpi4py and Open MPI start those of TensorRT-LLM's LLM API:
#: `python -B -R -m mpi4py.futures.server`. When one was killed, Open MPI 4.1.4 ended the other, and the daemon, the
#: model's process and mpi4py 4.1.2's futures went on. 1.2's executor/proxy.py watches the futures alone.
WORKERS = """
import os, pathlib, signal, subprocess, time
DAEMON = "tail -f /dev/null mpi4py.futures.server & echo $!; tail -f /dev/null mpi4py.futures.server & wait"
def start_workers():
    daemon = subprocess.Popen(["sh", "-c", DAEMON], start_new_session=True, stdout=subprocess.PIPE)
    worker = int(daemon.stdout.readline())
    # the shell names a worker before it has begun to run the command by which the server knows it
    while not pathlib.Path(f"/proc/{worker}/cmdline").read_bytes().startswith(b"tail"):
        time.sleep(0.01)
    return worker
"""


def test_a_worker_that_was_killed_ends_its_server(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = f"pathlib.Path({str(pid)!r}).write_text(str(start_workers()))"
    with started(echo_repository(tmp_path, WORKERS, start)) as server:
        os.kill(int(pid.read_text()), signal.SIGKILL)
        with pytest.raises(ServerError, match="A process of model echo ended unexpectedly"):
            server.wait(threading.Event())


@pytest.mark.parametrize("prefix", ["[TRT-LLM] [RANK 5] [E] ", "[TRT-LLM] [E] [_torch][RANK 5] "])
def test_a_worker_whose_loop_has_ended_ends_its_server(tmp_path: Path, prefix: str) -> None:
    """1.2.1 _torch/pyexecutor/py_executor.py, _event_loop_wrapper, logs the error, and its requests wait forever
    (NVIDIA/TensorRT-LLM #10663, #12735). The prefixes are those of the logs in #9263 and #18663.
    """
    line = f"[11/27/2026-03:10:11] {prefix}Error in event loop: no block is free"
    repository = echo_repository(tmp_path, execute=f"import time; print({line!r}, flush=True); time.sleep(600)")
    # it would be waited for longer than this test may take
    with started(repository, http=True, exit_timeout=10_000) as server:
        with pytest.raises(TimeoutError):
            infer(server.http_url, timeout=0.5)
        with pytest.raises(ServerError, match=r"TensorRT-LLM has ended its loop: no block is free\. .* is killed"):
            server.wait(threading.Event())


def test_running_requests_are_finished_first(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    repository = echo_repository(tmp_path, execute=f"import time; open({str(begun)!r}, 'w'); time.sleep(1.5)")
    server = started(repository, http=True)
    answer: list[bytes] = []
    thread = threading.Thread(target=lambda: answer.append(infer(server.http_url)))
    thread.start()
    wait_until(begun.exists)
    server.stop()
    thread.join(GENEROUS)
    assert b'"data":[7]' in answer[0]


def test_a_client_that_keeps_its_stream_open_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    code = "r.get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('y', x)]), flags=1)"
    repository = echo_repository(tmp_path, execute=f"for r in requests: x = r.inputs()[0].as_numpy(); {code}")
    model = repository / "echo" / "1" / "model.py"
    model.write_text(model.read_text().rsplit("        return", 1)[0])
    config = repository / "echo" / "config.pbtxt"
    config.write_text(config.read_text() + "model_transaction_policy { decoupled: true }")
    # it would be waited for longer than this test may take
    server = started(repository, exit_timeout=10_000)
    client = EngineClient(server.grpc_address)
    client.send("1", model="echo", x=7)
    assert client.receive()[1]["y"].item() == 7
    server.stop()
    client.close(cancel=True)
    assert (processes(server.pid), segments(server)) == ([], [])


def test_the_server_ends_when_its_parent_is_killed(repository: Path) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from llmops.model_repository.launch import Ports, start_triton
        server = start_triton(Path({str(repository)!r}), ports=Ports(0, 0, 0))
        server.wait_ready(120)
        print(server.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: processes(group) == [])
    remove_stale_segments()
    assert list(SHM_DIR.glob(f"*llmops_{parent.pid}_*")) == []


@pytest.mark.parametrize("which", ["http", "grpc", "metrics"])
def test_a_port_that_is_taken_is_named(repository: Path, which: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ResourceError, match=f"Port {port} .*for {which} .*--{which}-port"):
            start_triton(repository, ports=Ports(**{"http": 0, "grpc": 0, "metrics": 0, which: port}), http=True)


OTHER = "the engine is of another version"
# what lets Open MPI start workers on fewer cores than GPUs
KILLED = """assert os.environ["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
        worker = start_workers(); time.sleep(5); os.kill(worker, signal.SIGKILL); time.sleep(600)"""
RANK_5 = "[11/27/2026-03:10:11] [TRT-LLM] [RANK 5] [E] Failed to initialize executor on rank 5: CUDA out of memory."
UNKNOWN = "MPI_ERR_UNKNOWN: unknown error"


def failed(line: str, ending: str, said: str) -> tuple[str, str, str]:
    """1.2.1 executor/worker.py, worker_main, logs the error. executor/proxy.py knows that of rank 0 alone, and waits
    forever for the ranks that wait for another (NVIDIA/TensorRT-LLM #16342, #17817), and for those that Open MPI did
    not spawn: mpi4py's thread ends with the exception, and its futures stay pending (seen with 4.1.2).
    """
    load = f"print({line!r}, flush=True); {ending}"
    return "import time", load, rf"^Triton did not start: TensorRT-LLM failed {said}\.$"


FAILURES = {
    "syntax": ("def (", "pass", r"model echo did not load: invalid syntax \(model.py, line 3\)"),
    "import": ("import no_such_module", "pass", "model echo did not load: .*No module named 'no_such_module'"),
    "raises": ("", f"raise ValueError('{OTHER}')", OTHER),
    "killed worker": (WORKERS, KILLED, "did not start: a process of model echo ended while it loaded"),
    "no memory": failed(RANK_5, "time.sleep(600)", "on rank 5: CUDA out of memory"),
    "no memory, and an end": failed(RANK_5, "raise RuntimeError('Worker error')", "on rank 5: CUDA out of memory"),
    "MPI": failed(f"mpi4py.MPI.Exception: {UNKNOWN}", "time.sleep(600)", f"to start its workers: {UNKNOWN}"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_model_that_does_not_load_is_one_sentence(tmp_path: Path, monkeypatch, failure: str) -> None:
    top, initialize, message = FAILURES[failure]
    if "did not start" in message:  # Triton waits forever
        monkeypatch.setattr(model_processes, "LOSS_GRACE", 0.1)
    with (
        start_triton(echo_repository(tmp_path, top, initialize), ports=ANY) as server,
        pytest.raises(ServerError, match=message) as error,
    ):
        server.wait_ready(120)
    assert "\n" not in error.value.message
    # killed processes end a moment later
    wait_until(lambda: not processes(server.pid))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        # Triton's line is still in quotes if the signal comes before its end
        ("pb_utils.Logger.log_error('the disk is gone')",
         r"\(SIGABRT\); the last error in its log \(\d\d:\d\d:\d\d\) was: \"?the disk"),
        # Triton 2.51 aborts so in two of sixteen cases when a stub gets SIGKILL
        ("os.write(2, b'  what():  boost::interprocess::lock_exception' + bytes([10]))",
         r"when a process of a model is killed \(see dmesg\); the last error"),
    ],
)  # fmt: skip
def test_an_abort_names_the_last_error_since_and_its_usual_cause(tmp_path: Path, fault: str, said: str) -> None:
    code = f"import os, signal; {fault}; os.kill(os.getppid(), signal.SIGABRT)"
    with started(echo_repository(tmp_path, execute=code), http=True) as server:
        with contextlib.suppress(OSError):
            infer(server.http_url)
        with pytest.raises(ServerError, match=said):
            server.wait(threading.Event())


LOCK_FAULT = """#!/bin/sh
# the real server, but for its first start, which ends as upstream's do now and then
echo "$*" >> {starts}
if [ $(wc -l < {starts}) -le 1 ]; then
    echo "terminate called after throwing an instance of '{exception}'" >&2
    echo "  what():  {exception}" >&2
    kill -ABRT $$
fi
exec {real} "$@"
"""


def faulty(folder: Path, script: str, **values: str) -> tuple[Installation, Path]:
    """A tritonserver that fails once, and the file with a line per start."""
    real, starts = find_installation(), folder / "starts"
    fake = write_program(folder / "tritonserver", script.format(starts=starts, real=real.binary, **values))
    return replace(real, binary=fake), starts


def test_a_lock_fault_of_upstream_at_the_start_is_tried_again(tmp_path: Path, repository: Path) -> None:
    installation, starts = faulty(tmp_path, LOCK_FAULT, exception="boost::interprocess::lock_exception")
    said: list[LogLine] = []
    with started(repository, http=True, installation=installation, on_log=said.append) as server:
        assert b'"data":[7]' in infer(server.http_url)
        prefixes = re.findall(r"shm-region-prefix-name=(\S+)", starts.read_text())
        assert (len(set(prefixes)), prefixes[1]) == (2, server.shm_prefix)
        assert list(SHM_DIR.glob(f"{prefixes[0]}*")) == []
    assert [line.message for line in said if "starting it once more" in line.message] == [
        "Triton's Python backend ended at its start with boost::interprocess::lock_exception, a rare fault of its "
        "shared memory; starting it once more."
    ]
    assert segments(server) == []


PORT_TAKEN = """#!/bin/sh
# the real server, whose gRPC port another process takes before its first start
echo "$*" >> {starts}
port=$(echo "$*" | sed 's/.*--grpc-port=\\([0-9]*\\).*/\\1/')
if [ $(wc -l < {starts}) -le 1 ]; then
    {python} -c "import socket, time; s = socket.create_server(('127.0.0.1', $port)); time.sleep(60)" &
    sleep 1
fi
exec {real} "$@"
"""


def test_a_free_port_that_another_process_took_is_replaced(tmp_path: Path, repository: Path) -> None:
    installation, starts = faulty(tmp_path, PORT_TAKEN, python=sys.executable)
    said: list[LogLine] = []
    with started(repository, installation=installation, on_log=said.append) as server:
        tried = re.findall(r"--grpc-port=(\d+)", starts.read_text())
        assert len(set(tried)) == 2
        assert server.grpc_address == f"127.0.0.1:{tried[1]}"
    assert "Another process took a free port" in " ".join(line.message for line in said)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the installed wheel's server folder, by links, that a test may damage."""
    pytest.importorskip("pytriton")
    real = installation.find_wheel()
    root = tmp_path / "site" / "pytriton" / "tritonserver"
    shutil.copytree(real, root, copy_function=os.symlink)
    monkeypatch.setattr(installation, "find_wheel", lambda: root)
    return root


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bin/tritonserver", r"Triton binary .* is missing: reinstall it with `pip"),
        (f"python_backend_stubs/{PYTHON_VERSION}", rf"no stub for Python {PYTHON_VERSION}, only for .*3\.\d+"),
    ],
)
def test_a_file_that_the_wheel_lacks_is_named_with_its_fix(wheel: Path, repository: Path, name: str, said: str) -> None:
    path = wheel / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(MissingDependencyError, match=said):
        start_triton(repository, ports=ANY)


def test_a_missing_libpython_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: "/nowhere")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    said = r"libpython3\.\d+\.so\.1\.0 cannot be loaded.*apt-get install libpython"
    with pytest.raises(MissingDependencyError, match=said):
        start_triton(repository, ports=ANY)


def test_libraries_of_the_caller_come_before_those_of_the_wheel(monkeypatch, tmp_path):
    """NVIDIA's PyTorch image, the base of TensorRT-LLM's (docker/Dockerfile.multi), has these folders, and its entry
    point makes the second one for a driver that is older than the image. Ubuntu's folder of libpython also has the
    libcuda of the driver, with which CUDA does not start there, in Triton as in TensorRT-LLM's process below it.
    """
    pytest.importorskip("pytriton")
    theirs = "/usr/local/lib/python3.12/dist-packages/torch/lib:/usr/local/cuda/compat/lib:/usr/local/nvidia/lib"
    (tmp_path / f"libpython{PYTHON_VERSION}.so.1.0").touch()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", theirs)
    folders = find_installation().environment["LD_LIBRARY_PATH"]
    assert folders.startswith(f"{theirs}:")
    assert folders.endswith(f":{tmp_path}")


def test_without_the_wheel_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = r"nor nvidia-pytriton is installed; install it with: .*\[embedded\]"
    with pytest.raises(MissingDependencyError, match=said):
        start_triton(repository, ports=ANY)


def test_a_python_for_which_the_extra_has_no_wheel_is_told_which_one_has(monkeypatch, repository):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = [Requirement(line) for line in project["optional-dependencies"]["embedded"]]
    marker = next(wanted.marker for wanted in extra if wanted.name == "nvidia-pytriton")
    first = installation.FIRST_PYTHON_WITHOUT_NUMPY_1
    assert marker is not None
    for minor in range(11, 15):
        assert marker.evaluate({"python_version": f"3.{minor}"}) is ((3, minor) < first)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(installation, "FIRST_PYTHON_WITHOUT_NUMPY_1", sys.version_info[:2])
    said = r"has no wheels for Python 3\.\d+: install llmops with Python 3.12"
    with pytest.raises(MissingDependencyError, match=said):
        start_triton(repository, ports=ANY)


def test_numpy_2_beside_the_wheel_is_refused_before_it_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    installation.check_numpy()
    monkeypatch.setattr(installation, "installed_version", lambda name: "2.5.5")
    with pytest.raises(MissingDependencyError, match=r"numpy 2\.5\.5 is installed, .* `pip install 'numpy<2'`"):
        installation.check_numpy()


# -- Triton's log as a person reads it. The lines are real ones of tritonserver 2.51


LOADED = "I1121 09:34:19.123456 2475 model_lifecycle.cc:849] \"successfully loaded 'smollm2'\""
TABLE = "+------------------+------+"
FAILED = (
    "E1121 09:34:19.123456 2475 model_lifecycle.cc:655] \"failed to load 'echo' version 1: Internal: "
    'ValueError: no such engine\\n\\nAt:\\n  /r/echo/1/model.py(7): initialize\\n"'
)


NO_GPU = 'E1121 09:34:19.1 24 cuda_driver.cc:31] "CudaDriverHelper has not been initialized."'
ABORT = ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"]


def test_a_line_without_date_thread_and_source_file() -> None:
    assert str(parse_line(LOADED)) == "09:34:19 info    successfully loaded 'smollm2'"


def test_a_message_with_a_strangers_text_is_one_line_of_the_log_and_ends_no_server() -> None:
    """Before the fix, such a text reached the terminal as it was, and could pass for the end of an engine."""
    text = r"grammar: \x1b[2J m: the engine has ended: no\n09:34:20 error   forged".replace(r"\x1b", "\x1b")
    line = parse_line(f'E1121 09:34:19.1 24 model.py:8] "{text}"')
    said = ["09:34:19 error   grammar: \\x1b[2J m: the engine has ended: no", f"{'':17}09:34:20 error   forged"]
    assert str(line).splitlines() == said
    assert parse_engine_death(line) is None
    assert str(parse_line("\x1b]0;owned\x07")) == f"{'':17}\\x1b]0;owned\\x07"


def test_tables_and_what_a_machine_without_gpu_always_says_are_noise() -> None:
    assert parse_line(TABLE).is_noise
    assert parse_line('W1121 09:34:19.1 24 metrics.cc:811] "DCGM unable to start: DCGM initialization error"').is_noise
    assert not parse_line(LOADED).is_noise


def test_the_cause_is_the_exceptions_own_message() -> None:
    assert explain_failure([parse_line(LOADED), parse_line(FAILED)]) == "model echo did not load: no such engine"


def test_what_a_library_says_before_it_aborts_is_a_cause() -> None:
    lines = [parse_line(line) for line in (NO_GPU, *ABORT, " 0# 0x000055EE4F2E452D in tritonserver")]
    assert explain_failure(lines) == "terminate called after throwing an instance of 'std::bad_alloc'"
    assert last_error(lines) == parse_line(ABORT[1])


def test_truncated_weights_say_which_command_makes_them_again() -> None:
    line = FAILED.replace(
        "ValueError: no such engine", "RuntimeError: Exception from core.cpp:84:\\nIncorrect weights in bin file!."
    )
    assert explain_failure([parse_line(line)]) == (
        "model echo did not load: the engine's weights are incomplete; build the engine again with `llmops build "
        "--force`, and the repository with `llmops repo`"
    )
