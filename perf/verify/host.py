"""The host of an engine: its GPUs, and Triton's metrics of one engine model."""

import asyncio
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException

from llmops.metrics_pages import parse_samples
from llmops.perf.report.document import machine

#: Maximum number of bytes that are read of a metrics page. A server with a hundred models sends
#: less than half of it.
MAX_PAGE_BYTES = 2**20

#: Seconds between two polls, shorter than the 100 ms in which gauges are published.
_PAUSE = 0.02
#: Maximum seconds of the time limit that one poll uses up, so that a stalled host does not end the
#: wait.
_LONGEST = 2.0


class TritonGauges:
    """A reader of Triton's gauges of one engine model.

    `read` returns the values by (family, category), or an empty mapping without the page or the
    model.
    """

    def __init__(self, url: str, engine_model: str) -> None:
        self.url, self._model = url, engine_model

    async def read(self) -> dict[tuple[str, str], float]:
        try:
            page = await asyncio.to_thread(self._page)
            found = {}
            for sample in parse_samples(page, ("nv_trt_llm_",)):
                if sample.labels.get("model") == self._model:
                    category = next((v for k, v in sample.labels.items() if k not in ("model", "version")), "")
                    found[sample.name, category] = sample.value
        except (OSError, HTTPException, ValueError):
            return {}
        return found

    async def wait_for(self, condition: Callable[[dict[tuple[str, str], float]], bool], seconds: float) -> bool:
        """Wait until `condition` holds for the gauges. Return False after `seconds`.

        Time in which this machine stood still does not count.
        """
        while not condition(await self.read()):
            if seconds <= 0:
                return False
            begun = time.monotonic()
            await asyncio.sleep(_PAUSE)
            seconds -= min(time.monotonic() - begun, _LONGEST)
        return True

    def _page(self) -> str:
        with urllib.request.urlopen(self.url, timeout=60) as response:
            return str(response.read(MAX_PAGE_BYTES).decode())


_FIELDS = "name,clocks.sm,clocks.max.sm,memory.total,memory.used"


@dataclass(frozen=True)
class HostGpu:
    """A GPU of this host. Clocks are in MHz; `memory` and `used`, its used part, are in MiB."""

    name: str
    clock: float
    max_clock: float
    memory: float
    used: float


def gpus() -> list[HostGpu]:
    """Return the host's GPUs, or an empty list if nvidia-smi is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [_gpu(line) for line in text.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _gpu(line: str) -> HostGpu:
    name, *numbers = (part.strip() for part in line.split(","))
    return HostGpu(name, *(float(number) for number in numbers))


def device_name(target: str) -> str:
    """Return the name of the engine's device: the GPU, or the CPU for the target `openvino`."""
    found = [] if target == "openvino" else gpus()
    return found[0].name if found else str(machine()["cpu"])
