"""How long a gateway leaves others waiting while it is fuzzed, and how much memory it takes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

_PAUSE = 0.02


class HealthWatch:
    """Asks for /health/live from a thread of its own. `worst`: the longest that an answer took (s), with its start;
    `problems`: answers that were none, or not 200."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health/live"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.worst = 0.0
        self.problems: Counter[str] = Counter()

    def __enter__(self) -> HealthWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=120) as client:
            while not self._over.wait(_PAUSE):
                begun = time.perf_counter()
                try:
                    status = client.get(self._url).status_code
                    if status != 200:
                        self.problems[f"status {status}"] += 1
                except httpx.HTTPError as error:
                    self.problems[repr(error)] += 1
                self.worst = max(self.worst, time.perf_counter() - begun)


def memory_of(url: str, pid: int | None) -> float | None:
    """MiB that the process `pid` holds in memory, or all workers of the gateway at `url`; None when it does not tell.

    Raises httpx.HTTPError, and OSError when there is no such process.
    """
    if pid is not None:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else None
    told = re.search(r"^process_resident_memory_bytes (\S+)", httpx.get(f"{url}/metrics", timeout=120).text, re.M)
    return float(told[1]) / 2**20 if told else None
