"""Whether the event loop gets its turns: how late its timers are, whose work kept it, and what that work was.

A machine that is busy makes timers late as well. So a delay counts as ours (`held`) only as far as this process used
the processor meanwhile, and without the time in which the loop's thread was ready and the kernel ran something else
(schedstat's run delay). What is left is the loop's own work, or that of a thread with the interpreter's lock.
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

# seconds; each beat of loop and sampler is a few wake-ups of the processor, and costs about 50 us
HEARTBEAT_INTERVAL = 0.04
# seconds of the loop's time that one piece of work may take; and between two lines about it in the log
BLOCKED_THRESHOLD, LOG_INTERVAL = 0.05, 1.0
# seconds after which a beat is overdue enough to look why
OVERDUE_THRESHOLD = 0.005
# Whoever looks every now and then whether others are silent, and is later than this (s), was held up with the whole
# process: what they sent meanwhile has not been read yet.
PROCESS_STALL_THRESHOLD = 1.0
# a file in which every worker notes what held its loop for longer than LAG_REPORT_THRESHOLD, for test suites; `stage` is empty
# when none of the gateway's functions was seen
REPORT_FILE_VARIABLE, LAG_REPORT_THRESHOLD = "LLMOPS_LAG_REPORT", 0.25
_PACKAGE = str(Path(__file__).parents[1])
_THIS_FILE = str(Path(__file__))
# faulthandler's form, and the bytes of it that are looked at
_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
_CALL = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_MAX_DUMP_BYTES = 1 << 18
# frames that are always there, whatever runs
_ENTRY_POINTS = (str(Path(_PACKAGE) / "server.py"), str(Path(_PACKAGE) / "supervisor.py"))


class EventLoopMonitor:
    """Watches the loop that it is made in, until `close`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.worst = 0.0  # seconds held at once
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._stat = _open_schedstat()
        self._logged = -LOG_INTERVAL
        # what was seen running, and in which beat
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
            # it may have begun right after the last beat, so the whole span counts
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
        shown = stage or "work outside of the gateway's code, or over before it was seen"
        if self._last - self._logged >= LOG_INTERVAL:
            self._logged = self._last
            log.warning("the event loop was held for %.0f ms (of %.0f ms) by %s", held * 1e3, span * 1e3, shown)
        path = os.environ.get(REPORT_FILE_VARIABLE)
        if path and held > LAG_REPORT_THRESHOLD:
            with open(path, "a", encoding="utf-8") as report:
                line = {"pid": os.getpid(), "at": time.time(), "held": held, "of": span, "stage": stage}
                report.write(json.dumps(line) + "\n")

    def _run_delay(self) -> float:
        """Seconds in which the loop's thread was ready to run and did not; it is only asked of itself."""
        return int(os.pread(self._stat, 64, 0).split()[1]) / 1e9 if self._stat is not None else 0.0

    # -- in a thread of its own -------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Look what runs when the loop is late: while C code has the interpreter's lock, as soon as it gives it up."""
        with _open_scratch_file() as file:
            while not self._over:
                time.sleep(HEARTBEAT_INTERVAL)
                beat = self._last
                # only what was seen in the same beat counts: an earlier one may have been late for another reason
                if perf_counter() - beat > HEARTBEAT_INTERVAL + OVERDUE_THRESHOLD and not (
                    self._seen[0] == beat and self._seen[1]
                ):
                    self._seen = beat, [stage for stage in self._running(file.fileno()) if stage]

    def _running(self, file: int) -> Iterator[str]:
        """What the loop does, then what other threads do.

        faulthandler writes it down without giving the interpreter's lock away. A walk over `sys._current_frames()`
        does not keep it, and crashes where a thread goes on meanwhile (seen with Python 3.11.7).
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
    """Of each thread the gateway's functions that run, innermost first; empty when none does."""
    for thread in _THREAD.split(dump)[1:]:
        ident, _, stack = thread.partition(" ")
        calls = (_CALL.match(line) for line in stack.splitlines())
        own = [(call["path"], call["line"], call["name"]) for call in calls if call and _is_own(call["path"])]
        yield int(ident, 16), " < ".join(f"{path[len(_PACKAGE) + 1 :]}:{line} {name}" for path, line, name in own[:4])


def _is_own(path: str) -> bool:
    return path.startswith(_PACKAGE) and path != _THIS_FILE and path not in _ENTRY_POINTS


def _open_scratch_file() -> IO[bytes]:
    """Memory where Linux has it: a container's root may be read-only."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("llmops-lag"), "w+b")
    return tempfile.TemporaryFile()


def _open_schedstat() -> int | None:
    """Linux tells it per thread; elsewhere a busy machine's delays count as the process's, if it was busy as well."""
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None
