"""Several gateway workers on one port: one process each, forked before anything is connected or started."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

# a worker that dies at once must not be forked in a busy loop (s)
RESTART_DELAY = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Supervisor:
    """Keeps `count` child processes at work until SIGTERM or Ctrl-C, which counts from the moment this is made.

    Signals are handed on to the workers, which drain; a second one ends them at once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # by the descriptor that tells of its end: process id and index
        self._workers: dict[int, tuple[int, int]] = {}
        self._stopping = self._forced = False
        for number in _SIGNALS:
            signal.signal(number, self._hand_on)

    def run(self, work: Callable[[int], object]) -> bool:
        """Run `work(index)` in each worker, and start a worker that dies again.

        Returns True if a second signal ended the workers before their answers had ended.
        """
        self._work = work
        for index in range(self._count):
            self._start(index)
        while self._workers:
            self._replace_one()
        return self._forced

    def _replace_one(self) -> None:
        # only the workers are waited for: another child of this process, such as Triton, is its starter's
        ended = select.poll()
        for descriptor in self._workers:
            ended.register(descriptor, select.POLLIN)
        (descriptor, _), *_ = ended.poll()
        with _block_signals():
            pid, index = self._workers.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
        if not self._stopping:
            log.error("worker %d ended with code %d; starting it again", index, os.waitstatus_to_exitcode(status))
            time.sleep(RESTART_DELAY)
            self._start(index)

    def _start(self, index: int) -> None:
        """A signal comes before the fork, and there is none, or after it, and the worker is known."""
        with _block_signals():
            if self._stopping:
                return
            parent = os.getpid()
            pid = os.fork()
            if pid:
                self._workers[os.pidfd_open(pid)] = pid, index
            else:
                self._be_worker(index, parent)

    def _be_worker(self, index: int, parent: int) -> None:
        """Never returns."""
        code = 1
        try:
            self._leave_supervisor(parent)
            self._work(index)
            code = 0
        except Exception:
            log.exception("worker %d", index)
        finally:
            os._exit(code)

    def _leave_supervisor(self, parent: int) -> None:
        """Signals are still held: none of them is handled as the supervisor would."""
        # Ctrl-C goes to a whole process group; a worker must hear it once, from its supervisor
        os.setpgid(0, 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != parent:
            raise SystemExit

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self._forced, self._stopping = self._stopping, True
        for pid, _ in self._workers.values():
            os.kill(pid, signal.SIGTERM)


@contextmanager
def _block_signals() -> Iterator[None]:
    """What comes in this block is handled after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
