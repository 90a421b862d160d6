"""What processes themselves used: CPU, memory, threads and files, from /proc (Linux)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """`pid` and all its children, their children and so on, that are alive."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def cpu_seconds(pids: list[int]) -> float:
    """User and system time that `pids` have used so far, in steps of a clock tick (10 ms)."""
    return sum(_cpu(pid) for pid in pids)


def _cpu(pid: int) -> float:
    try:
        # the second field is the name in parentheses, which may itself hold spaces
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


@dataclass(frozen=True)
class Footprint:
    """Of a set of processes at one moment. `memory` in bytes: what is theirs alone (private pages)."""

    memory: int
    threads: int
    files: int


def footprint(pids: list[int]) -> Footprint:
    """Sum over `pids`; those that have ended count as nothing."""
    memory = threads = files = 0
    for pid in pids:
        try:
            threads += len(os.listdir(f"/proc/{pid}/task"))
            files += len(os.listdir(f"/proc/{pid}/fd"))
            memory += _private_bytes(pid)
        except OSError:
            continue
    return Footprint(memory, threads, files)


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class CpuMeter:
    """Reads several groups of processes at once: `meter.read()` gives seconds of CPU per group, and the clock."""

    def __init__(self, groups: dict[str, list[int]]) -> None:
        self._groups = groups

    def read(self) -> dict[str, float]:
        used = {name: cpu_seconds(pids) for name, pids in self._groups.items()}
        return {**used, "wall": time.perf_counter()}


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was used in between."""
    return {name: after[name] - before[name] for name in after}
