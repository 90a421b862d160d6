"""Resource use of processes, from /proc (Linux): CPU, memory, threads and files."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36


def as_user(uid: int, work: Callable[[], object]) -> str:
    """Do something in a child process of another user, which only root can make, and return the error that it raised.

    Without an error the text is empty.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            work()
        except BaseException as error:
            said = getattr(error, "message", repr(error))
        finally:
            os.write(writable, said.encode())
            os._exit(0)
    os.close(writable)
    _, status = os.waitpid(child, 0)
    with os.fdopen(readable) as pipe:
        return pipe.read() or ("" if status == 0 else f"the process ended with status {status}")


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


def runs(pid: int) -> bool:
    """Return whether the process has not ended yet; one whose exit code nobody has collected has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def commands() -> dict[int, str]:
    """Command line of every living process, whole: `ps` cuts it to the terminal's width."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def cpu_seconds(pids: list[int]) -> float:
    """User and system time that `pids` have used so far."""
    return sum(_cpu(pid) for pid in pids)


def _cpu(pid: int) -> float:
    try:
        # clock_getcpuclockid(3): to the nanosecond, where /proc counts ticks of 10 ms
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Footprint:
    """The resources of a set of processes at one moment.

    Attributes:
        memory: Private pages only, in bytes.
    """

    memory: int
    threads: int
    files: int


def footprint(pids: list[int]) -> Footprint:
    """Sum over `pids`; those that have ended do not count."""
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
    """Return the resources used between two measurements."""
    return {name: after[name] - before[name] for name in after}


class Others:
    """CPU that processes outside this one's tree use: `others.cores()` is the mean since it was made.

    Timings taken while others work mean little; a report says how much others worked.
    """

    def __init__(self) -> None:
        # orphans become our children: Triton's stubs would otherwise count as others once their parent has ended
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._busy, self._own, self._wall = _busy_seconds(), _tree_seconds(), time.perf_counter()

    def cores(self) -> float:
        others = (_busy_seconds() - self._busy) - (_tree_seconds() - self._own)
        return max(0.0, others / (time.perf_counter() - self._wall))


def _busy_seconds() -> float:
    # cpu user nice system idle iowait irq softirq steal
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICK


def _tree_seconds() -> float:
    """This process and its descendants, with those that have ended and were waited for."""
    total = 0
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(value) for value in fields[11:15])
    return total / _TICK
