"""A program that a test starts as users do, whose output goes to a file."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmops.process import with_parent_death_signal
from tests.support.forked_cli import ForkedProcess
from tests.support.processes import cpu_seconds, descendants
from tests.support.waiting import wait_until

#: The command line of this environment, which runs in a fork of a process that has loaded it.
LLMOPS = (sys.executable, "-m", "llmops.cli")


class LiveProcess:
    """A running command. It ends with the test process, should nothing else end it.

    Args:
        command: The program and its arguments.
        log: The file for its output, standard error included.
        environment: Variables beside those of the test process.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        env = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with log.open("wb") as output:
            if tuple(command[: len(LLMOPS)]) == LLMOPS:
                self.process = ForkedProcess(command[len(LLMOPS) :], env, output.fileno())
            else:
                tied, nothing = with_parent_death_signal(list(command)), subprocess.DEVNULL
                self.process = subprocess.Popen(tied, stdin=nothing, stdout=output, stderr=subprocess.STDOUT, env=env)
        self.pid = self.process.pid

    def found(self, pattern: str) -> str:
        """Wait for `pattern`, a regular expression, in the output and return its first group.

        Raises:
            AssertionError: The process ended, or nothing matched for a long time.
        """
        compiled = re.compile(pattern, re.MULTILINE)

        def is_there() -> bool:
            if compiled.search(self.log):
                return True
            assert self.alive, f"{self.process.args} ended: {self.log[-2000:]}"
            return False

        wait_until(is_there, f"{pattern} in {self._log}")
        match = compiled.search(self.log)
        assert match is not None
        return match[1]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def log_bytes(self) -> int:
        return self._log.stat().st_size

    def memory(self) -> int:
        """Return the bytes of memory that this process and its children have resident now."""
        return sum(_status(pid, "VmRSS") for pid in descendants(self.pid))

    def peak(self) -> int:
        """Return the largest resident size, in bytes, that this process and its children have had."""
        return sum(_status(pid, "VmHWM") for pid in descendants(self.pid))

    def cpu(self) -> float:
        """Return the seconds of CPU that this process and its children have used."""
        return cpu_seconds(descendants(self.pid))

    def kill(self) -> None:
        """End the process with SIGKILL, also when it is stopped, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the process with SIGTERM, or with SIGKILL if it does not end."""
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


def _status(pid: int, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
