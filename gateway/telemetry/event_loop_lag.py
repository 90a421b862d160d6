"""The lag of the event loop: how late its timers are, and which work blocked it.

A busy machine makes timers late as well. So only the CPU time that this process used during a delay
counts as blocked, without the time in which the kernel ran something else although the loop's
thread was ready (schedstat's run delay). The rest is work of the event loop, or of a thread that
held the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import IO

from llmops.gateway.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

#: Seconds between two heartbeats of the loop, and of the sampling thread. Each costs about 50 µs.
HEARTBEAT_INTERVAL = 0.04
#: Seconds between two heartbeats from which the loop counts as blocked.
BLOCKED_THRESHOLD = 0.05
#: Seconds between two log lines about a blocked loop.
LOG_INTERVAL = 1.0
#: Seconds of lateness after which the sampling thread looks for the cause.
OVERDUE_THRESHOLD = 0.005
#: Seconds of lateness of a timer after which the process stood still. Checks for silent peers must
#: then wait, because the messages that arrived meanwhile are not read yet.
PROCESS_STALL_THRESHOLD = 1.0
#: Environment variable with a file to which every gateway appends what blocked its loop, for test
#: suites.
REPORT_FILE_VARIABLE = "LLMOPS_LAG_REPORT"
#: Seconds from which a blocked loop is in the report.
LAG_REPORT_THRESHOLD = 0.25
_PACKAGE = str(Path(__file__).parents[1])
_THIS_FILE = str(Path(__file__))
# the format of faulthandler, and the bytes of a dump that are parsed
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
_CALL = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_MAX_DUMP_BYTES = 1 << 18
# modules whose frames are always on the stack
_ENTRY_POINTS = (str(Path(_PACKAGE) / "launcher.py"), str(Path(_PACKAGE) / "supervisor.py"))


class EventLoopMonitor:
    """A monitor of the event loop in which it is created, until `close`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.worst = 0.0  # longest time blocked at once, in seconds
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._stat = _open_schedstat()
        self._logged = -LOG_INTERVAL
        # the last heartbeat in which the sampler looked, and the stacks that it saw
        self._seen: tuple[float, list[str]] = (0.0, [])
        self._over = False
        self._note()
        self._timer = self._loop.call_at(self._loop.time() + HEARTBEAT_INTERVAL, self._beat)
        self._sampler = threading.Thread(target=self._sample, name="lag-watch", daemon=True)
        self._sampler.start()

    def close(self) -> None:
        self._over = True
        self._timer.cancel()
        if self._stat is not None:
            os.close(self._stat)
            self._stat = None

    def _note(self) -> None:
        self._last, self._used, self._delayed = perf_counter(), time.process_time(), self._run_delay()

    def _beat(self) -> None:
        before, used, delayed = self._last, self._used, self._delayed
        self._note()
        span = self._last - before
        self._metrics.lag.observe(max(span - HEARTBEAT_INTERVAL, 0.0))
        self._metrics.settle()
        if span > BLOCKED_THRESHOLD:
            # the work may have begun right after the last heartbeat, so the whole span counts
            self._stalled(span, min(span - (self._delayed - delayed), self._used - used), self._stage_in(before))
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._beat)

    def _stage_in(self, beat: float) -> str:
        when, stages = self._seen
        return stages[0] if when == beat and stages else ""

    def _stalled(self, span: float, held: float, stage: str) -> None:
        self.worst = max(self.worst, held)
        if held < BLOCKED_THRESHOLD:
            return
        self._metrics.held.inc(held)
        shown = stage or "work outside of the gateway's code, or work that ended before it was sampled"
        if self._last - self._logged >= LOG_INTERVAL:
            self._logged = self._last
            log.warning("The event loop was blocked for %.0f ms (of %.0f ms) by %s", held * 1e3, span * 1e3, shown)
        path = os.environ.get(REPORT_FILE_VARIABLE)
        if path and held > LAG_REPORT_THRESHOLD:
            with open(path, "a", encoding="utf-8") as report:
                line = {"pid": os.getpid(), "at": time.time(), "held": held, "of": span, "stage": stage}
                report.write(json.dumps(line) + "\n")

    def _run_delay(self) -> float:
        """Return the seconds in which the loop's thread was ready and did not run.

        Must be called by that thread.
        """
        return int(os.pread(self._stat, 64, 0).split()[1]) / 1e9 if self._stat is not None else 0.0

    # -- in a thread of its own --------------------------------------------------------------------

    def _sample(self) -> None:
        """Record the stacks when the loop is late.

        While C code holds the interpreter's lock this has to wait.
        """
        with _open_scratch_file() as file:
            while not self._over:
                time.sleep(HEARTBEAT_INTERVAL)
                beat = self._last
                # only stacks of the same heartbeat count: an earlier one may have been late for
                # another reason
                if perf_counter() - beat > HEARTBEAT_INTERVAL + OVERDUE_THRESHOLD and not (
                    self._seen[0] == beat and self._seen[1]
                ):
                    self._seen = beat, [stage for stage in self._running(file.fileno()) if stage]

    def _running(self, file: int) -> Iterator[str]:
        """Yield the stack of the loop's thread, then those of the other threads.

        faulthandler dumps them without releasing the interpreter's lock. A walk over
        `sys._current_frames()` releases it, and crashes if a thread continues meanwhile (seen with
        Python 3.11.7).
        """
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file, all_threads=True)
        found = dict(_parse_stacks(os.pread(file, _MAX_DUMP_BYTES, 0).decode(errors="replace")))
        yield found.pop(self._thread_id, "")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, stage in found.items():
            if ident != threading.get_ident():
                yield f"{stage} (thread {names.get(ident, ident)})" if stage else ""


def _parse_stacks(dump: str) -> Iterator[tuple[int, str]]:
    """Yield each thread's id and its functions of the gateway, innermost first.

    The text is empty for a thread without such functions.
    """
    for thread in _THREAD.split(dump)[1:]:
        ident, _, stack = thread.partition(" ")
        calls = (_CALL.match(line) for line in stack.splitlines())
        own = [(call["path"], call["line"], call["name"]) for call in calls if call and _is_own(call["path"])]
        yield int(ident, 16), " < ".join(f"{path[len(_PACKAGE) + 1 :]}:{line} {name}" for path, line, name in own[:4])


def _is_own(path: str) -> bool:
    return path.startswith(_PACKAGE) and path != _THIS_FILE and path not in _ENTRY_POINTS


def _open_scratch_file() -> IO[bytes]:
    """Return a file in memory where the system has memfd: a container's root may be read-only."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("llmops-lag"), "w+b")
    return tempfile.TemporaryFile()


def _open_schedstat() -> int | None:
    """Open the thread's scheduling statistics.

    Without them, delays by other processes count as this one's.
    """
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None
