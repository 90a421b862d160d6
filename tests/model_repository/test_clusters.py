"""Several machines: the Slurm script and the LeaderWorkerSet, and its leader's script with real servers.

Field names and types are those of the LeaderWorkerSet CRD (kubernetes-sigs/lws v0.9.0), against which the manifest was
validated as a whole by hand.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import yaml

from llmops.errors import InputError
from llmops.model_repository.multi_gpu import export_launch
from llmops.model_repository.multi_gpu.lws import MPI_RSH_AGENT, leader_script
from llmops.model_repository.multi_gpu.multi_node import plan_multi_node
from llmops.model_repository.server.command import SHM_PREFIX, LaunchOptions, Ports
from llmops.model_repository.server.installation import find_installation
from llmops.model_repository.server.shared_memory import remove_segments
from tests.model_repository.test_launch import infer
from tests.model_repository.test_multi_gpu import SERVER, engine, marker, mpirun_or_skip, parking_repository
from tests.support.programs import write_program
from tests.support.servers import free_port, refuses
from tests.support.stack import wait_ready
from tests.support.waiting import GENEROUS, wait_until


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An engine of 16 GPUs."""
    made = parking_repository(tmp_path)
    marker(tiny=engine(8, pp_size=2, directory=str(tmp_path / "engine"))).save(made)
    return made


def export(kind: str, repository: Path, gpus: int = 8, **more: str) -> str:
    image = "registry.example/llmops:trtllm" if kind == "lws" else None
    return export_launch(kind, repository, LaunchOptions(**more), gpus_per_node=gpus, image=image, claim="models")


@pytest.mark.parametrize("image", [None, "llmops:trtllm", "team/llmops:trtllm"])
def test_an_image_that_only_this_machine_knows_is_not_exported(repository: Path, image: str | None) -> None:
    with pytest.raises(InputError, match=r"cannot pull .*llmops:trtllm: push the image"):
        export_launch("lws", repository, LaunchOptions(), gpus_per_node=8, image=image, claim="models")


@pytest.mark.parametrize(
    ("image", "named"),
    [("registry:5000/llmops:1", "registry:5000#llmops:1"), *[(one, one) for one in ("./llmops.sqsh", "team/llmops:1")]],
)
def test_slurm_gets_images_as_enroot_names_them(repository: Path, image: str, named: str) -> None:
    """NVIDIA/enroot 3.4 `src/docker.sh`, import: [<user>@][<registry>#]<image>[:<tag>], with no colon in an image."""
    script = export_launch("slurm", repository, LaunchOptions(), gpus_per_node=8, image=image, claim="models")
    assert re.search(r"--container-image='?([^'\s]+)", script)[1] == named


def test_slurm_starts_one_task_per_gpu_and_tells_them_apart(repository: Path, tmp_path: Path) -> None:
    """A program in place of srun runs every task.

    A program in place of tritonserver prints its arguments.
    """
    script = export("slurm", repository)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in script
    assert "--container-image='nvcr.io#nvidia/tritonserver:26.07-trtllm-python-py3'" in script
    # the server could write the engine and its own code
    mounts = re.search(r"--container-mounts='?([^'\s]+)", script)[1].split(",")
    assert all(mount.endswith(":ro") for mount in mounts)
    write_program(
        tmp_path / "bin" / "srun",
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do echo "srun $1"; shift; done\n'
        'for id in 0 1 15; do SLURM_PROCID=$id "$@"; done\n',
    )
    server = write_program(tmp_path / "bin" / "server", '#!/bin/bash\necho "$SLURM_PROCID: $*"\n')
    (tmp_path / "job.sh").write_text(script.replace(SERVER, str(server)))
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", tmp_path / "job.sh"], env=environment, capture_output=True, text=True, check=True)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line[0].isdigit())
    assert "srun --mpi=pmix" in done.stdout
    assert "--grpc-port=8001" in said["0"]
    assert re.search(r"--grpc-restricted-protocol=shared-memory,trace,logging:llmops=[0-9a-f]{32} ", said["0"])
    assert "--model-control-mode=explicit" not in said["0"]
    assert said["1"] == said["15"]
    assert "--model-control-mode=explicit --load-model=tiny-tensorrt_llm" in said["1"]


#: What 1.2 does on rank 0: tensorrt_llm/llmapi/trtllm-llmapi-launch prints the command, splits it at spaces, and starts
#: it beside its leader node, which `--action stop` ends. After a command that failed, `set -e` skips that.
LAUNCHER = """#!/bin/bash
set -e
task_with_command="${@:1}"
echo "rank0 run ${task_with_command} in background" >&2
( $task_with_command ) &
sleep 60
"""


@pytest.mark.parametrize("kind", ["slurm", "lws"])
def test_the_llm_apis_launcher_starts_the_server_prints_no_secret_and_ends_with_the_server(kind, repository, tmp_path):
    marker(tiny=engine(16, "python", directory=str(tmp_path / "engine"))).save(repository)
    text = export(kind, repository)
    scripts = {"ConfigMap": {"data": {"leader.sh": text}}}
    if kind == "lws":
        scripts = {one["kind"]: one for one in yaml.safe_load_all(text)}
    script = scripts["ConfigMap"]["data"]["leader.sh"]
    assert "SLURM_PROCID" not in script
    binaries = tmp_path / "bin"
    # both start a process group of the task's own
    write_program(binaries / "srun", '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nsetsid --wait "$@"\n')
    write_program(
        binaries / "mpirun",
        '#!/bin/bash\nwhile [[ $1 == -* ]]; do [[ $1 == --a* ]] || shift; shift; done\nsetsid --wait "$@"\n',
    )
    write_program(binaries / "kubectl", "#!/bin/bash\n")
    write_program(binaries / "trtllm-llmapi-launch", LAUNCHER)
    server = write_program(binaries / "server", '#!/bin/bash\nprintf "%s\\n" "$@"\nexit 1\n')
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "POD_NAME": "tiny-0"}
    line = ["bash", "-c", script.replace(SERVER, str(server))]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode not in (0, None)
    (secret,) = re.findall(
        r"--grpc-restricted-protocol=shared-memory,trace,logging:llmops=([0-9a-f]{32})\n", done.stdout
    )
    assert f"--model-repository={repository}\n" in done.stdout
    assert "rank0 run" in done.stderr
    assert secret not in done.stderr
    if kind == "lws":
        # mpirun hands on its own variables alone to other machines
        assert "-x LLMOPS_SERVER -n 16 trtllm-llmapi-launch" in script


def test_the_leaderworkerset_is_one_pod_per_machine(repository: Path, tmp_path: Path) -> None:
    objects = {one["kind"]: one for one in yaml.safe_load_all(export("lws", repository))}
    assert list(objects) == ["ServiceAccount", "Role", "RoleBinding", "ConfigMap", "LeaderWorkerSet", "Service"]
    group = objects["LeaderWorkerSet"]
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    template = group["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    for part in ("leaderTemplate", "workerTemplate"):
        pod = template[part]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert container["volumeMounts"][0]["mountPath"] == str(tmp_path)
        rights = container["securityContext"]
        assert (rights["allowPrivilegeEscalation"], rights["seccompProfile"]) == (False, {"type": "RuntimeDefault"})
        assert rights["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    leader, worker = (template[part]["spec"] for part in ("leaderTemplate", "workerTemplate"))
    assert leader["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
    assert worker["automountServiceAccountToken"] is False
    # one other pod, and no pod of another application
    assert [rule["resourceNames"] for rule in objects["Role"]["rules"]] == [["tiny-0-1"]] * 2
    labels = template["leaderTemplate"]["metadata"]["labels"]
    selector = objects["Service"]["spec"]["selector"]
    assert selector == {"leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"], "role": labels["role"]}
    for text in objects["ConfigMap"]["data"].values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    assert [port["containerPort"] for port in leader["ports"]] == [8001, 8002]
    assert [leader[f"{probe}Probe"]["grpc"] for probe in ("startup", "readiness", "liveness")] == [{"port": 8001}] * 3
    script = objects["ConfigMap"]["data"]["leader.sh"]
    assert "--grpc-restricted-protocol=shared-memory,trace,logging:llmops=$LLMOPS_SECRET" in script
    assert f"-n 1 {SERVER}" in script
    assert f": -n 15 {SERVER}" in script


def test_two_leaderworkersets_share_no_name(tmp_path: Path) -> None:
    """A LeaderWorkerSet names its pods NAME-NUMBER and NAME-NUMBER-NUMBER, and creates a Service with its own name.

    Before the fix, the leader of `a` could run commands in the pod a-0-1 of `a-0`.
    """
    repository, taken = parking_repository(tmp_path), set()
    for name in ("a", "a-0", "a-0-1", "a-triton", "llama-3.1", "m" * 60 + "-b"):
        marker(**{name: engine(8, pp_size=2, directory=str(tmp_path / "engine"))}).save(repository)
        objects = {one["kind"]: one["metadata"]["name"] for one in yaml.safe_load_all(export("lws", repository))}
        group, service = objects["LeaderWorkerSet"], objects["Service"]
        assert re.fullmatch("[a-z]([a-z0-9-]{0,50}[a-z0-9])?", group)
        names = {group, service, *(f"{group}{end}" for end in ("-0", "-1", "-0-1", "-0-2", "-1-1"))}
        assert not names & taken
        taken |= names


@pytest.mark.parametrize(
    ("engines", "gpus", "says"),
    [
        ({"a": engine(8), "b": engine(8)}, 8, "needs exactly one engine"),
        ({"a": engine(8)}, 3, "--gpus-per-node 3 does not divide the 8 GPUs of a"),
        ({"a": engine(8)}, 8, "no common parent folder"),
        # cpp/tensorrt_llm/runtime/worldConfig.cpp, WorldConfig::mpi: as many device ids as ranks, all below the GPUs of
        # a machine
        ({"a": engine(2, gpu_device_ids="2,3")}, 8, "a was put on GPU 2,3 of this machine, but an export has 1 with"),
        ({"a": engine(2, gpu_device_ids="0,1")}, 1, "an export has 2 with GPUs 0 to 0: make the repository"),
    ],
)
def test_what_cannot_be_exported(tmp_path: Path, engines: dict, gpus: int, says: str) -> None:
    repository = parking_repository(tmp_path)
    marker(**engines).save(repository)
    with pytest.raises(InputError, match=says):
        export("lws", repository, gpus)


#: As kubectl, which waits for a condition only of a pod that exists; here it exists after a wait for that.
KUBECTL = """#!/bin/bash
[ "$1 $2" = "wait --for=create" ] && { touch FOLDER/created; exit 0; }
if [ "$1" = wait ]; then
  [ -e FOLDER/created ] || { echo "NotFound" >&2; exit 1; }
  echo "waited for $3" >>FOLDER/kubectl
  exit 0
fi
echo "exec in $2" >>FOLDER/kubectl
shift 3
exec "$@"
"""


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
def test_the_leaders_script_starts_ranks_in_both_pods_and_stops_them_in_order(tmp_path: Path) -> None:
    """Real mpirun and real Triton servers; kubectl's place is taken by a program that runs the command here."""
    mpirun_or_skip()
    repository = parking_repository(tmp_path, 1.5)
    port = free_port()
    options = LaunchOptions(ports=Ports(port, free_port(), free_port()), exit_timeout=20, http=True)
    cluster = plan_multi_node(repository, options, gpus_per_node=1, image=None)
    assert (cluster.nodes, cluster.world_size) == (2, 2)
    binaries = tmp_path / "bin"
    write_program(binaries / "kubectl", KUBECTL.replace("FOLDER", str(tmp_path)))
    write_program(binaries / "kubessh", '#!/bin/sh\npod=$1\nshift\nexec kubectl exec "$pod" -- /bin/sh -c "$*"\n')
    here = find_installation()
    script = leader_script(cluster).replace(MPI_RSH_AGENT, str(binaries / "kubessh")).replace(SERVER, str(here.binary))
    script = script.replace("/opt/tritonserver/backends", str(here.backends))
    # a pod's shared memory goes with it; here the rank that is killed in the end would leave its own
    prefix = f"{SHM_PREFIX}{os.getpid()}_cluster_"
    script = script.replace(SHM_PREFIX, prefix)
    assert prefix in script
    environment = {**os.environ, **here.environment, "POD_NAME": socket.gethostname()}
    environment["PATH"] = f"{binaries}:{environment['PATH']}"
    leader = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
    try:
        wait_ready(f"http://127.0.0.1:{port}/v2/health/ready")
        other = f"{socket.gethostname()}-1"
        assert (tmp_path / "kubectl").read_text() == f"waited for pod/{other}\nexec in {other}\n"
        wait_until((tmp_path / "rank1").exists)
        assert (tmp_path / "rank1").read_text() == "tiny-tensorrt_llm"
        answer: list[bytes] = []
        thread = Thread(target=lambda: answer.append(infer(f"http://127.0.0.1:{port}")))
        thread.start()
        wait_until((tmp_path / "begun").exists)
        leader.send_signal(signal.SIGTERM)
        thread.join(GENEROUS)
        assert b'"data":[7]' in answer[0]
        leader.wait(GENEROUS)
        wait_until(lambda: refuses(port))
    finally:
        for group in (signal.SIGTERM, signal.SIGKILL):
            if leader.poll() is None:
                os.killpg(leader.pid, group)
                time.sleep(1)
        shutil.rmtree(repository)
        remove_segments(prefix)


@pytest.mark.parametrize("kind", ["lws", "slurm"])
def test_an_engine_for_our_1_3_image_is_refused_as_no_server_lies_at_nvidias_path(tmp_path: Path, kind: str) -> None:
    made = parking_repository(tmp_path)
    later = engine(8, "python", directory=str(tmp_path / "engine"))
    marker(tiny=replace(later, tensorrt_llm="1.3.0rc29")).save(made)
    with pytest.raises(InputError, match=r"image trtllm-1\.3, whose tritonserver lies in a Python package"):
        export(kind, made)
