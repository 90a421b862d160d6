"""Several gateway workers on one port: one process each, forked before anything is connected or started."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

# a worker that dies at once must not be forked in a busy loop (s)
RESTART_PAUSE = 0.5
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Supervisor:
    """Runs `work(index)` in `count` child processes, and again in place of one that dies, until SIGTERM or Ctrl-C.

    Signals are handed on to the workers, which drain; a second one ends them at once.
    """

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count = count
        self._work = work
        self._workers: dict[int, int] = {}
        self._stopping = False

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hand_on)
        for index in range(self._count):
            self._start(index)
        while self._workers:
            pid, status = os.wait()
            index = self._workers.pop(pid)
            if not self._stopping:
                log.error("worker %d ended with code %d; starting it again", index, os.waitstatus_to_exitcode(status))
                time.sleep(RESTART_PAUSE)
                self._start(index)

    def _start(self, index: int) -> None:
        if self._stopping:
            return
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._workers[pid] = index
            return
        code = 1
        try:
            self._become_worker(parent)
            self._work(index)
            code = 0
        except Exception:
            log.exception("worker %d", index)
        finally:
            os._exit(code)

    def _become_worker(self, parent: int) -> None:
        # Ctrl-C goes to a whole process group; a worker must hear it once, from its supervisor
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
