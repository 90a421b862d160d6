"""Supervision of several gateway processes that serve one port.

The processes are forked before anything is connected or any thread is started, except the threads
that write standard output and standard error.
"""

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

from llmops.background_output import finish_output
from llmops.errors import LlmopsError

log = logging.getLogger(__name__)

#: Seconds before a worker that ended is started again. Prevents a worker that fails at its start
#: from being forked in a busy loop.
RESTART_DELAY = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Supervisor:
    """A supervisor that keeps `count` workers running until SIGTERM or Ctrl-C.

    The supervisor handles signals from its creation on. The first signal is forwarded to the
    workers, which drain. A second signal ends the workers immediately.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # Process id and index of each worker, by the pidfd of its process.
        self._workers: dict[int, tuple[int, int]] = {}
        self._stopping = self._forced = False
        for number in _SIGNALS:
            signal.signal(number, self._forward)

    def run(self, work: Callable[[int], object]) -> bool:
        """Run `work(index)` in each worker, and restart workers that end.

        Returns:
            True if a second signal ended the workers before their answers were complete.
        """
        self._work = work
        for index in range(self._count):
            self._start(index)
        while self._workers:
            self._replace_one()
        return self._forced

    def _replace_one(self) -> None:
        # Only workers are waited for. Other children of this process, such as Triton, are waited
        # for by the code that started them.
        ended = select.poll()
        for descriptor in self._workers:
            ended.register(descriptor, select.POLLIN)
        (descriptor, _), *_ = ended.poll()
        with _block_signals():
            pid, index = self._workers.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
        if not self._stopping:
            log.error(
                "Worker %d ended with exit code %d; the supervisor starts it again. The lines before show why it ended",
                index,
                os.waitstatus_to_exitcode(status),
            )
            time.sleep(RESTART_DELAY)
            self._start(index)

    def _start(self, index: int) -> None:
        """Fork a worker.

        Signals are blocked meanwhile, so that a signal finds either no worker or a registered
        worker.
        """
        with _block_signals():
            if self._stopping:
                return
            parent = os.getpid()
            pid = os.fork()
            if pid:
                self._workers[os.pidfd_open(pid)] = pid, index
            else:
                self._run_worker(index, parent)

    def _run_worker(self, index: int, parent: int) -> None:
        """Run the worker's function in the child process, then end the process.

        `parent` is the process id of the supervisor.
        """
        code = 1
        try:
            self._leave_supervisor(parent)
            self._work(index)
            code = 0
        except LlmopsError as error:
            log.error("Worker %d: %s", index, error.message)
        except Exception:
            log.exception("Worker %d", index)
        finally:
            finish_output()
            os._exit(code)

    def _leave_supervisor(self, parent: int) -> None:
        """Reset process group, signal handlers and death signal in a worker's process.

        Signals stay blocked until their handlers are reset. The worker exits if `parent`, the
        process id of the supervisor, is not its parent any longer.
        """
        # Ctrl-C sends SIGINT to a whole process group. In its own group, a worker receives the
        # signal only once, from the supervisor.
        os.setpgid(0, 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if os.getppid() != parent:
            raise SystemExit

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._forced, self._stopping = self._stopping, True
        for pid, _ in self._workers.values():
            os.kill(pid, signal.SIGTERM)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
