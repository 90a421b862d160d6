"""What this machine has left."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int | None:
    """What can be had without swapping, within this container's limit; None where /proc does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    return min(free, _cgroup_free())


def _cgroup_free() -> int:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return int(limit) - used if limit != "max" else 2**62
    except (OSError, ValueError):
        return 2**62
