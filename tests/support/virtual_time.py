"""Run coroutines whose sleeps take no time: minutes of timers pass in milliseconds, and always in the same order."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever nothing else is to be done.

    It suits code without input and output, because no time passes while such code waits for a descriptor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if timers and not self._ready:
            self.now = max(self.now, min(timers))
        super()._run_once()


def run_in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end in a loop of its own. `asyncio.get_running_loop().time` is its clock."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(work)
