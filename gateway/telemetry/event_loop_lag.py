"""The lag of the event loop: how late its timers fire, and which code blocked it.

Timers are also late when the machine is busy. Only the CPU time that this process used during a
delay therefore counts as blocked, without the time in which the loop's thread was ready but the
kernel ran other threads (schedstat's run delay). The remaining time was used by the event loop, or
by a thread that held the GIL.
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

#: Seconds between two heartbeats of the event loop, and between two checks of the sampling thread.
#: A heartbeat and a check each cost about 50 µs.
HEARTBEAT_INTERVAL = 0.04
#: Seconds between two heartbeats above which the event loop counts as blocked: a heartbeat that is
#: 10 ms late.
BLOCKED_THRESHOLD = 0.05
#: Minimum seconds between two log lines about a blocked event loop.
LOG_INTERVAL = 1.0
#: Seconds by which a heartbeat is late before the sampling thread records the stacks.
OVERDUE_THRESHOLD = 0.005
#: Seconds by which a timer is late above which the whole process was stopped. Checks for silent
#: peers must then wait, because messages that arrived meanwhile have not been read.
PROCESS_STALL_THRESHOLD = 1.0
#: Environment variable with the path of a file to which every gateway appends what blocked its
#: event loop. Test suites set the variable.
REPORT_FILE_VARIABLE = "LLMOPS_LAG_REPORT"
#: Seconds above which a blocked event loop is written to the file of REPORT_FILE_VARIABLE.
LAG_REPORT_THRESHOLD = 0.25
_PACKAGE = str(Path(__file__).parents[1])
_THIS_FILE = str(Path(__file__))
# patterns for faulthandler's format, and the maximum size of a dump that is parsed
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
_CALL = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_MAX_DUMP_BYTES = 1 << 18
# modules whose frames are on every stack and say nothing about the cause
_ENTRY_POINTS = (str(Path(_PACKAGE) / "launcher.py"), str(Path(_PACKAGE) / "supervisor.py"))


class EventLoopMonitor:
    """A monitor of the current event loop. Runs from its creation to `close`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.worst = 0.0  # longest time blocked at once, in seconds
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._stat = _open_schedstat()
        self._logged = -LOG_INTERVAL
        # time of the last heartbeat for which the sampler recorded a stack, and this stack
        self._seen: tuple[float, str] = (0.0, "")
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
        # first, because writing a report may fail
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._beat)
        span = self._last - before
        self._metrics.lag.observe(max(span - HEARTBEAT_INTERVAL, 0.0))
        self._metrics.settle()
        if span > BLOCKED_THRESHOLD:
            # the work may have begun right after the last heartbeat, so the whole span counts
            self._stalled(span, min(span - (self._delayed - delayed), self._used - used), self._stage_in(before))

    def _stage_in(self, beat: float) -> str:
        when, stage = self._seen
        return stage if when == beat else ""

    def _stalled(self, span: float, held: float, stage: str) -> None:
        self.worst = max(self.worst, held)
        if held < BLOCKED_THRESHOLD:
            return
        self._metrics.held.inc(held)
        shown = stage or "code outside of the gateway, or code that ended before it was sampled"
        if self._last - self._logged >= LOG_INTERVAL:
            self._logged = self._last
            log.warning(
                "The event loop was blocked for %.0f of %.0f ms by %s; requests waited meanwhile",
                held * 1e3,
                span * 1e3,
                shown,
            )
        path = os.environ.get(REPORT_FILE_VARIABLE)
        if path and held > LAG_REPORT_THRESHOLD:
            with open(path, "a", encoding="utf-8") as report:
                line = {"pid": os.getpid(), "at": time.time(), "held": held, "of": span, "stage": stage}
                report.write(json.dumps(line) + "\n")

    def _run_delay(self) -> float:
        """Return the seconds for which the loop's thread was ready but did not run.

        Must be called in the loop's thread.
        """
        return int(os.pread(self._stat, 64, 0).split()[1]) / 1e9 if self._stat is not None else 0.0

    # -- runs in the sampling thread ---------------------------------------------------------------

    def _sample(self) -> None:
        """Record a stack whenever the event loop is late.

        While C code holds the GIL, this thread waits, so that such code may end before it is
        sampled.
        """
        with _open_scratch_file() as file:
            while not self._over:
                time.sleep(HEARTBEAT_INTERVAL)
                beat = self._last
                # record once per heartbeat: stacks of an earlier heartbeat may belong to another
                # delay
                if perf_counter() - beat > HEARTBEAT_INTERVAL + OVERDUE_THRESHOLD and not self._stage_in(beat):
                    self._seen = beat, self._running(file.fileno())

    def _running(self, file: int) -> str:
        """Return the stack of the loop's thread, or of another thread of the gateway.

        faulthandler dumps stacks without releasing the GIL. Walking over `sys._current_frames()`
        releases the GIL, and crashes if a thread continues meanwhile (seen with Python 3.11.7).
        """
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file, all_threads=True)
        found = dict(_parse_stacks(os.pread(file, _MAX_DUMP_BYTES, 0).decode(errors="replace")))
        own = found.pop(self._thread_id, "")
        return own or next((f"{stage} (another thread)" for stage in found.values() if stage), "")


def _parse_stacks(dump: str) -> Iterator[tuple[int, str]]:
    """Yield each thread's id and its functions of the gateway as text, innermost first.

    The text is empty for a thread that runs no function of the gateway.
    """
    for thread in _THREAD.split(dump)[1:]:
        ident, _, stack = thread.partition(" ")
        calls = (_CALL.match(line) for line in stack.splitlines())
        own = [(call["path"], call["line"], call["name"]) for call in calls if call and _is_own(call["path"])]
        yield int(ident, 16), " < ".join(f"{path[len(_PACKAGE) + 1 :]}:{line} {name}" for path, line, name in own[:4])


def _is_own(path: str) -> bool:
    return path.startswith(_PACKAGE) and path != _THIS_FILE and path not in _ENTRY_POINTS


def _open_scratch_file() -> IO[bytes]:
    """Return a temporary file, in memory if the system has memfd.

    A container's root file system may be read-only.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("llmops-lag"), "w+b")
    return tempfile.TemporaryFile()


def _open_schedstat() -> int | None:
    """Open the scheduling statistics of this thread, or return None if the system has none.

    Without them, delays caused by other processes count as delays of this process.
    """
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None
