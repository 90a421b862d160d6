"""Checks of the communication between the GPUs of one engine.

The checks cover NCCL, shared memory, locked memory and NVSwitch.

Sources: NCCL user guide, "Environment Variables" (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE,
NCCL_IB_DISABLE; also read from /etc/nccl.conf) and "Troubleshooting" (`--shm-size=1g --ulimit
memlock=-1` for containers).
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmops.model_repository.doctor import CheckResult, CheckStatus

#: Minimum bytes of /dev/shm, in which ranks share host buffers: the size that NCCL's guide gives
#: containers.
MIN_SHM = 1 << 30
#: Variables that switch off a transport of NCCL, with the effect.
DISABLED = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through host memory instead of NVLink",
    "NCCL_SHM_DISABLE": "GPUs that cannot reach each other directly use the network",
    "NCCL_IB_DISABLE": "machines exchange data over IP sockets instead of InfiniBand",
}


def check_collectives(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Iterator[CheckResult]:
    """Yield a check of each setting that slows down or stops tensor parallelism.

    `root` is the folder that holds /proc and /etc.
    """
    yield _nccl(root, environment)
    yield from _shared_memory(root)
    yield _locked_memory(root)
    yield from _nvswitch(root)


def _nccl(root: Path, environment: Mapping[str, str]) -> CheckResult:
    config = root / "etc/nccl.conf"
    lines = config.read_text().splitlines() if config.is_file() else []
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.lstrip().startswith("#"))
    # environment variables take precedence over the file
    found = {name.strip(): value.strip() for name, value in pairs} | dict(environment)
    off = {name: cost for name, cost in DISABLED.items() if found.get(name, "0") not in ("", "0")}
    if off:
        detail = "; ".join(f"{name}={found[name]}: {cost}" for name, cost in off.items())
        # only engines on several machines need InfiniBand
        status: CheckStatus = "note" if list(off) == ["NCCL_IB_DISABLE"] else "not ok"
        return CheckResult("NCCL", status, detail, f"unset {', '.join(off)}, also in /etc/nccl.conf")
    chosen = [f"{name}={value}" for name, value in sorted(found.items()) if name.startswith("NCCL_")]
    return CheckResult("NCCL", "ok", ", ".join(chosen) or "no variables set; NCCL chooses the transports")


def _shared_memory(root: Path) -> Iterator[CheckResult]:
    try:
        total = shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return
    if total < MIN_SHM:
        fix = "start the container with `--ipc host` or `--shm-size=1g`"
        yield CheckResult("/dev/shm for NCCL", "not ok", f"{total >> 20} MiB in all, less than 1 GiB", fix)


def _locked_memory(root: Path) -> CheckResult:
    limits = root / "proc/self/limits"
    line = next((line for line in _lines(limits) if line.startswith("Max locked memory")), "")
    soft = line.removeprefix("Max locked memory").split()[:1]
    if soft == ["unlimited"]:
        return CheckResult("locked memory", "ok", "unlimited")
    detail = f"{soft[0]} bytes" if soft else "unknown"
    # InfiniBand and pinned buffers in containers need locked memory; NVLink alone does not
    return CheckResult("locked memory", "note", detail, "start the container with `--ulimit memlock=-1`")


def _nvswitch(root: Path) -> Iterator[CheckResult]:
    """Check that a machine with NVSwitches runs a fabric manager.

    A container cannot see the fabric manager on the host.
    """
    switches = len(list((root / "proc/driver/nvidia-nvswitch/devices").glob("*")))
    if not switches:
        return
    names = (_lines(path) for path in (root / "proc").glob("[0-9]*/comm"))
    if any(name and name[0].startswith("nv-fabricmanage") for name in names):
        yield CheckResult("NVSwitch", "ok", f"{switches}, with a fabric manager")
    else:
        fix = "on the host, `systemctl start nvidia-fabricmanager`, in the driver's version"
        yield CheckResult(
            "NVSwitch", "note", f"{switches}, but no fabric manager among the processes that are visible here", fix
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
