"""Engines of one repository on GPUs of their own."""

from collections import namedtuple
from pathlib import Path

import pytest

from llmops.errors import InputError, ResourceError
from llmops.model_repository import gpu_assignment
from llmops.model_repository.doctor import collectives
from llmops.model_repository.gpu_assignment import GpuRequirement, assign_gpus, check_gpu_count, share_gpus
from llmops.model_repository.multi_gpu.launch_plan import without_slurm_variables
from llmops.perf.verify import host
from tests.support.nvidia_smi import install_nvidia_smi


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_assignment, "count_gpus", lambda: None)


def test_several_engines_get_gpus_of_their_own() -> None:
    """Without it each takes GPU 0: `LLM()` maps its ranks to GPUs from 0 on (NVIDIA/TensorRT-LLM
    #11153).
    """
    needs = [GpuRequirement(*one) for one in (("a", 2), ("b", 1), ("c", 4, (4, 5, 6, 7)), ("d", 1))]
    assert assign_gpus(needs, {"b": (1,)}) == {"a": (2, 3), "b": (1,), "c": (4, 5, 6, 7), "d": (0,)}


@pytest.mark.parametrize(
    ("needs", "wanted", "says"),
    [
        ({"a": 1, "b": 1}, {"a": (0,), "b": (0,)}, "a and b would both run on GPU 0: give each"),
        ({"a": 2}, {"a": (0,)}, "a needs 2 different GPUs, but was given 0"),
        ({"a": 2}, {"a": (1, 1)}, "a needs 2 different GPUs, but was given 1,1"),
        ({"a": 2}, {"x": (0,)}, "no GPU engine has that name; choose one of a"),
    ],
)
def test_an_overlap_or_a_wrong_number_is_refused(needs: dict[str, int], wanted: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        assign_gpus([GpuRequirement(*one) for one in needs.items()], wanted)


def test_more_gpus_than_there_are_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_assignment, "count_gpus", lambda: 2)
    with pytest.raises(InputError, match=r"^b would run on GPU 3, but this machine has 2; .* take 4: serve fewer"):
        assign_gpus([GpuRequirement("a", 2), GpuRequirement("b", 2)], {})
    with pytest.raises(ResourceError, match=r"^The engines of this repository need 8 GPUs, but this machine has 2"):
        check_gpu_count(8)


def test_the_gpus_are_counted_as_nvidia_smi_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    install_nvidia_smi(monkeypatch, tmp_path, gpus=4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_assignment.count_gpus() == 4
    assert share_gpus(1, 2) == ["0", "1"]
    a, b, c, d = (f"GPU-0000000{number}" for number in range(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{a}, {b},{c},{d}")
    assert gpu_assignment.count_gpus() == 4
    assert share_gpus(2, 2) == [f"{a},{b}", f"{c},{d}"]


def test_clocks_and_memory_are_read_as_nvidia_smi_prints_them(monkeypatch, tmp_path) -> None:
    install_nvidia_smi(monkeypatch, tmp_path)
    assert host.gpus() == [host.HostGpu("NVIDIA H200", 345.0, 1980.0, 143771.0, 4.0)]


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [
        ("", 0), ("-1", 0), ("7", 0), ("7,0", 0), ("0,7", 1), ("0,-1", 1), (" 0", 1), ("00", 1), ("NoDevFiles", 0),
        ("²", 0), ("GPU-00000000-0000", 1), ("GPU-7", 0),
    ],
)  # fmt: skip
def test_gpus_count_up_to_the_first_that_does_not_exist(monkeypatch, tmp_path, chosen: str, seen: int) -> None:
    """`seen` is torch.cuda.device_count() of torch 2.11 on a machine with one H200."""
    monkeypatch.undo()
    install_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert gpu_assignment.count_gpus() == seen
    said = f"need 2 GPUs, but CUDA_VISIBLE_DEVICES={chosen} leaves {seen}: serve fewer"
    with pytest.raises(ResourceError, match=said):
        check_gpu_count(2)


def test_mpi_does_not_see_the_slurm_allocation() -> None:
    """MPI_ERR_SPAWN otherwise: ai-dynamo/dynamo #808 and #992."""
    inside = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1", "PMIX_RANK": "0", "PATH": "/bin"}
    assert without_slurm_variables(inside) == {"PATH": "/bin"}
    launched = {**inside, "TLLM_SPAWN_PROXY_PROCESS": "1"}
    assert without_slurm_variables(launched) == launched
    outside = {"PMIX_RANK": "0", "PATH": "/bin"}
    assert without_slurm_variables(outside) == outside


# -- `llmops doctor` on several GPUs, against made-up /proc, /etc and /dev trees


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight healthy GPUs: locked memory without a limit, four NVSwitches and their fabric manager."""
    monkeypatch.setattr(collectives.shutil, "disk_usage", lambda path: Usage(8 << 30, 0, 8 << 30))
    limits = "Limit                     Soft Limit           Hard Limit           Units\n"
    _write(
        tmp_path / "proc/self/limits", f"{limits}Max locked memory         unlimited            unlimited    bytes\n"
    )
    for switch in range(4):
        _write(tmp_path / f"proc/driver/nvidia-nvswitch/devices/0000:0{switch}:00.0", "")
    _write(tmp_path / "proc/77/comm", "nv-fabricmanage\n")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _found(root: Path, **environment: str) -> dict[str, collectives.CheckResult]:
    return {one.name: one for one in collectives.check_collectives(root, environment)}


def test_a_healthy_machine_has_nothing_to_mend(machine):
    found = _found(machine, NCCL_DEBUG="WARN", NCCL_P2P_DISABLE="0")
    assert {name: one.status for name, one in found.items()} == {
        "NCCL": "ok", "locked memory": "ok", "NVSwitch": "ok",
    }  # fmt: skip
    assert "NCCL_DEBUG=WARN" in found["NCCL"].detail


@pytest.mark.parametrize("name", collectives.DISABLED)
def test_a_transport_that_is_off_is_named_with_its_cost(machine, name):
    check = _found(machine, **{name: "1"})["NCCL"]
    expected = "note" if name == "NCCL_IB_DISABLE" else "not ok"
    assert (check.status, f"{name}=1: " in check.detail) == (expected, True)
    assert name in check.fix


def test_nccl_conf_counts_and_the_environment_wins(machine):
    _write(machine / "etc/nccl.conf", "# NCCL_IB_DISABLE=1\nNCCL_P2P_DISABLE = 1\n")
    assert _found(machine)["NCCL"].detail.startswith("NCCL_P2P_DISABLE=1")
    assert _found(machine, NCCL_P2P_DISABLE="0")["NCCL"].status == "ok"


def test_limits_of_a_plain_container_are_named(machine, monkeypatch):
    monkeypatch.setattr(collectives.shutil, "disk_usage", lambda path: Usage(64 << 20, 0, 64 << 20))
    limits = machine / "proc/self/limits"
    limits.write_text("Max locked memory         65536                65536                bytes\n")
    found = _found(machine)
    assert (found["locked memory"].status, found["locked memory"].detail) == ("note", "65536 bytes")
    assert "64 MiB" in found["/dev/shm for NCCL"].detail
