"""Delays of other clients and memory of a gateway that is fuzzed."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

_PAUSE = 0.02


class HealthWatch:
    """Asks for /health/live from a separate process, which the fuzzer's own work does not hold up.

    Afterwards `worst` is the longest that an answer took (s), and `problems` counts what was not answered, or not
    with 200. `asked` is set once it has asked for the first time.
    """

    def __init__(self, url: str) -> None:
        # not a fork: httpx's threads and sockets stay here
        context = multiprocessing.get_context("spawn")
        self.asked, self._over, self._seen = context.Event(), context.Event(), context.SimpleQueue()
        arguments = (f"{url}/health/live", self.asked, self._over, self._seen)
        self._process = context.Process(target=_watch, args=arguments, daemon=True)
        self.worst = 0.0
        self.problems: Counter[str] = Counter()

    def __enter__(self) -> HealthWatch:
        self._process.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self.worst, self.problems = self._seen.get()
        self._process.join()


def _watch(url: str, asked: Any, over: Any, seen: Any) -> None:
    worst, problems = 0.0, Counter[str]()
    with httpx.Client(timeout=120) as client:
        while not over.wait(_PAUSE):
            begun = time.perf_counter()
            try:
                status = client.get(url).status_code
                if status != 200:
                    problems[f"status {status}"] += 1
            except httpx.HTTPError as error:
                problems[repr(error)] += 1
            worst = max(worst, time.perf_counter() - begun)
            asked.set()
    seen.put((worst, problems))


def memory_of(url: str, pid: int | None) -> float | None:
    """MiB that the process `pid` holds in memory, or all workers of the gateway at `url`; None when it does not tell.

    Raises httpx.HTTPError, and OSError when there is no such process.
    """
    if pid is not None:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else None
    told = re.search(r"^process_resident_memory_bytes (\S+)", httpx.get(f"{url}/metrics", timeout=120).text, re.M)
    return float(told[1]) / 2**20 if told else None
