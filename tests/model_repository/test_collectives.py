"""`llmops doctor` on several GPUs, against made-up /proc, /etc and /dev trees."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from llmops.model_repository.doctor import collectives

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight healthy GPUs: locked memory without a limit, four NVSwitches and their fabric manager."""
    monkeypatch.setattr(collectives.shutil, "disk_usage", lambda path: Usage(8 << 30, 0, 8 << 30))
    limits = "Limit                     Soft Limit           Hard Limit           Units\n"
    _write(
        tmp_path / "proc/self/limits", limits + "Max locked memory         unlimited            unlimited    bytes\n"
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


def test_a_missing_fabric_manager_is_a_note_as_containers_do_not_see_the_host(machine):
    (machine / "proc/77/comm").write_text("bash\n")
    assert _found(machine)["NVSwitch"].status == "note"
