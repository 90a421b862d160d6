"""What the load generator itself costs: its CPU, and how late its event loop ran."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

HEARTBEAT_INTERVAL = 0.05  # seconds between two looks at the loop


@dataclass
class GeneratorCost:
    """`cpu` and `wall` in seconds, `lags` in seconds: how much later than due each heartbeat came."""

    cpu: float = 0.0
    wall: float = 0.0
    lags: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Share of one core."""
        return self.cpu / self.wall if self.wall else 0.0


class GeneratorCostMeter:
    """Async context manager that fills an `GeneratorCost`."""

    async def __aenter__(self) -> GeneratorCost:
        self._cost = GeneratorCost()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._beat())
        return self._cost

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        self._cost.cpu = time.process_time() - self._cpu
        self._cost.wall = time.perf_counter() - self._wall

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + HEARTBEAT_INTERVAL
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            self._cost.lags.append(time.perf_counter() - due)
