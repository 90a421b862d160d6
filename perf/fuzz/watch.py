"""How long a gateway leaves others waiting while it is fuzzed."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import httpx

_PAUSE = 0.02


class HealthWatch:
    """Asks for /health/live from a thread of its own. `worst`: the longest that an answer took (s), with its start."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/health/live"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.worst = 0.0

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
                with contextlib.suppress(httpx.HTTPError):
                    client.get(self._url)
                self.worst = max(self.worst, time.perf_counter() - begun)
