"""Detection of machine faults and engine hangs while Triton still reports itself ready.

The detectors are pure: callers pass them the text that they read and the time. `FaultWatch` reads
the kernel's log, metrics pages and Triton's gauges.
"""

import asyncio
import contextlib
import errno
import os
import re
import ssl
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmops.errors import ServerError
from llmops.urls import fetch_bounded

#: Fatal Xid errors, with their meaning. NVIDIA's catalog resets the GPU or its machine for them;
#: 48, 74 and 94 also end an engine of TensorRT-LLM. Xids 63 and 92 are missing, because the GPU
#: continues to work: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
FATAL_XIDS = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "micro-controller halt",
    64: "failed ECC row remapping",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP timeout",
    120: "GSP error",
    136: "failed link training",
    140: "unrecovered ECC error",
    143: "failed initialisation",
    155: "NVLink error of software",
    156: "resource retirement",
    158: "GPU timeout",
}
#: Xid errors of NVLink 5, with the beginning of the messages for which NVIDIA's catalog resets the
#: GPU.
_NVLINK_XIDS, _FATAL_MESSAGE = range(144, 151), re.compile(r", \w+ +Fatal\b")
#: Counters of DCGM that must not rise, with the meaning of a rise.
_DCGM_COUNTERS = {
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "double-bit ECC errors",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "rows remapped after uncorrectable errors",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "failed row remapping",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "NVLink recovery errors",
}
_DCGM_XID, _DCGM_THERMAL = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_THERMAL_VIOLATION"
#: Maximum share of the time in which a GPU may be throttled by its temperature.
MAX_THROTTLED = 0.5
#: Nanoseconds in a second. DCGM reports the throttling time in nanoseconds.
_NANOSECONDS = 1e9
#: Metric of node-problem-detector that is 1 for a condition that is true.
_NODE_PROBLEM = "problem_gauge"
_WATCHED = frozenset({*_DCGM_COUNTERS, _DCGM_XID, _DCGM_THERMAL, _NODE_PROBLEM})
#: Maximum number of series whose last value is remembered. Without a bound, a page with new names
#: at each read would fill the memory.
MAX_SERIES = 10_000
_GPU_PROBLEM = re.compile(r"gpu|xid|nvlink|nvrm|nvidia", re.I)
#: The prefix that /dev/kmsg, dmesg or syslog puts before a message of the driver. The same message
#: later in a line is not the driver's, because the kernel logs the names of cgroups and processes
#: that it kills. A priority above 7 marks the line of a program that writes to /dev/kmsg.
_PREFIX = (
    r"(?:<[0-7]>)?(?:[0-7],\d+,\d+,[^;]*;"
    r"|(?:(?:[A-Z][a-z]{2} +\d+ [\d:]{8}|\d{4}-\S+) \S+ kernel: ?)?(?:\[[^\]]*\] ?)?)"
)
_XID = re.compile(
    _PREFIX
    # a MIG device's address is followed by its GPU and compute instances
    + r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)(?: GPU-C?I:\d+)*\): (\d{1,4})\b"
)
#: A fatal error of an NVSwitch. NVIDIA resets the NVSwitch and its GPUs after such an error.
_SXID = re.compile(_PREFIX + r"nvidia-nvswitch\d+: SXid \(PCI:([0-9A-Fa-f:.]+)\): (\d{1,5}), Fatal,")
#: Labels of DCGM's exporter that identify a GPU or a GPU instance. Other labels change over time,
#: such as the pod that uses the GPU.
_GPU_LABELS = re.compile(r'\b(?:gpu|uuid|GPU_I_ID|hostname)="[^"]*"', re.I)
_DCGM = "DCGM_FI_"
_SAMPLE = re.compile(r"^(\w+)\{(.*)\}[ \t]+([-+]?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d++)?)(?=\s|$)", re.M)
#: Maximum number of bytes that one poll reads of a kernel log. Bounds memory and time.
MAX_READ_BYTES = 8 << 20
#: Maximum number of bytes of a line in a kernel log. Bounds memory for a line without an end.
MAX_LINE_BYTES = 64 << 10
#: Seconds between two polls of the sources of faults: few, because requests fail after a fault.
WATCH_INTERVAL = 2.0
#: Period in seconds for which restarts are counted. More restarts than the limit within the period
#: are a crash loop.
RESTART_WINDOW = 600.0
#: Maximum seconds to read a metrics page, so that a slow exporter does not delay other checks.
_PAGE_TIMEOUT = 2.0
#: Maximum size of a metrics page in bytes. Bounds memory.
_PAGE_BYTES = 8 << 20

#: The values of a metrics page, by metric name and labels.
Samples = Mapping[tuple[str, str], float]


class MachineFaultError(ServerError):
    """An error for a fault of the machine, on which a restart would not help."""


def parse_samples(page: str) -> Samples:
    """Return the samples that have labels from a page in Prometheus' text format."""
    return {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(page)}


def _label(labels: str, name: str) -> str:
    """Return the value of a label, or an empty text if the label is missing."""
    match = re.search(rf'\b{name}="([^"]*)"', labels)
    return match[1] if match else ""


def find_xid(lines: Iterable[str], gpus: Sequence[str] = ()) -> str | None:
    """Return a sentence on the first fatal Xid or SXid in lines of a kernel log, or None.

    `gpus` are the PCI addresses of the GPUs to watch; without any, all GPUs are watched. SXid
    errors come from NVSwitches, which a single GPU does not use.
    """
    for line in lines:
        if len(gpus) != 1 and (match := _SXID.match(line)):
            return f"SXid {match[2]} on NVSwitch {match[1]}"
        match = _XID.match(line)
        if match is None:
            continue
        fault = FATAL_XIDS.get(int(match[2]))
        if int(match[2]) in _NVLINK_XIDS and _FATAL_MESSAGE.match(line, match.end()):
            fault = "fatal NVLink error"
        if fault is None:
            continue
        # compare parts of the addresses: the log writes 0000:3b:00, nvidia-smi 00000000:3B:00.0
        address = match[1].lower().split(".")[0][-7:]
        if not gpus or any(address in gpu.lower() for gpu in gpus):
            return f"Xid {match[2]} on GPU {match[1]} ({fault})"
    return None


class GpuFaultDetector:
    """A detector of faults in successive pages of DCGM's exporter and of node-problem-detector.

    Only a change counts as a fault, because a value on the first page may be a week old.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float] = {}
        self._gpus: set[str] = set()
        self._read = 0.0

    def update(self, samples: Samples, now: float) -> str | None:
        """Return a description of a fault on a new page, or None."""
        elapsed, self._read = now - self._read, now
        # use one series per GPU, because a series with a changed label would have no earlier value
        watched: dict[tuple[str, str], float] = {}
        gpus = set()
        for (name, labels), value in samples.items():
            if name.startswith(_DCGM):
                labels = ",".join(_GPU_LABELS.findall(labels))
                gpus.add(labels)
            if name in _WATCHED:
                watched[name, labels] = value
        if len(self._known) > MAX_SERIES:
            self._known = {key: value for key, value in self._known.items() if key in watched}
        known, self._gpus = self._gpus, gpus
        for key, value in watched.items():
            before, self._known[key] = self._known.get(key), value
            if before is None and key[0] == _DCGM_XID and key[1] in known:
                # before a GPU's first Xid, DCGM 4.4.2 has no value and its exporter no series
                before = 0.0
            if before is None or value == before:
                continue
            fault = self._judge(*key, before, value, elapsed)
            if fault is not None:
                return fault
        return None

    def _judge(self, name: str, labels: str, before: float, value: float, elapsed: float) -> str | None:
        gpu = _label(labels, "gpu") or "?"
        if name == _DCGM_XID and value in FATAL_XIDS:
            return f"Xid {value:.0f} on GPU {gpu} ({FATAL_XIDS[int(value)]})"
        if name in _DCGM_COUNTERS and value > before:
            return f"{_DCGM_COUNTERS[name]} on GPU {gpu}"
        if name == _DCGM_THERMAL and elapsed > 0 and (value - before) / _NANOSECONDS / elapsed > MAX_THROTTLED:
            return f"GPU {gpu} is throttled by its temperature"
        if name == _NODE_PROBLEM and value and _GPU_PROBLEM.search(labels):
            return f"node-problem-detector reports {labels}"
        return None


class ProgressDetector:
    """A detector of engines that have requests but make no step, even if they report health."""

    def __init__(self, timeout: float) -> None:
        """Create a detector. `timeout` is the longest time in seconds that a step may take."""
        self._timeout = timeout
        # by model: the counter of steps, and the time since which it has this value with requests
        self._steps: dict[str, tuple[float, float]] = {}

    def update(self, samples: Samples, now: float) -> str | None:
        """Return the name of a model that hangs, or None."""
        busy: dict[str, float] = {}
        for (name, labels), value in samples.items():
            model = _label(labels, "model")
            if name == "nv_trt_llm_request_metrics" and re.search(r'request_type="(active|waiting)"', labels):
                busy[model] = busy.get(model, 0.0) + value
        for (name, labels), steps in samples.items():
            if name != "nv_trt_llm_general_metrics" or 'general_type="iteration_counter"' not in labels:
                continue
            model = _label(labels, "model")
            known, since = self._steps.get(model, (-1.0, now))
            if not busy.get(model) or steps != known:
                self._steps[model] = (steps, now)
            elif now - since > self._timeout:
                return model
        return None


class RestartBudget:
    """The limit of a server's restarts: at most `limit` within RESTART_WINDOW."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._restarts: list[float] = []

    def take(self, now: float) -> bool:
        """Count a restart and return True, or return False if the limit is reached."""
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW]
        if len(self._restarts) >= self.limit:
            return False
        self._restarts.append(now)
        return True

    @property
    def spent_message(self) -> str:
        """Return the beginning of a sentence on a server that `take` does not allow to restart."""
        minutes = RESTART_WINDOW / 60
        return f"It was started {self.limit + 1} times within {minutes:g} minutes, so it is not started again"


class KernelLog:
    """A reader of the lines that are added to a log file or /dev/kmsg."""

    def __init__(self, path: Path) -> None:
        """Open the log. Raises OSError."""
        self._path = path
        self._file = self._open(os.SEEK_END)
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the lines since the last call. A rotated or truncated file is read again."""
        data = self._read()
        if not data:
            with contextlib.suppress(OSError):
                found, own = os.stat(self._path), os.fstat(self._file)
                if found.st_ino != own.st_ino or (own.st_size and os.lseek(self._file, 0, os.SEEK_CUR) > own.st_size):
                    # the path may now hold something else than a readable file
                    new = self._open(os.SEEK_SET)
                    self.close()
                    self._file = new
                    data = self._read()
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:MAX_LINE_BYTES]
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        os.close(self._file)

    def _open(self, whence: int) -> int:
        file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.lseek(file, 0, whence)
            if stat.S_ISDIR(os.fstat(file).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError:
            os.close(file)
            raise
        return file

    def _read(self) -> bytes:
        found: list[bytes] = []
        size = 0
        while size < MAX_READ_BYTES:
            try:
                some = os.read(self._file, 65536)
            except BlockingIOError:  # /dev/kmsg has no more records
                break
            except BrokenPipeError:  # the kernel has overwritten records that were not read yet
                continue
            if not some:
                break
            # a read of /dev/kmsg returns one record
            found.append(some)
            size += len(some)
        return b"".join(found)


@dataclass(frozen=True)
class FaultSources:
    """The sources of signs of machine faults and hangs.

    Attributes:
        kernel_log: The path of a file with the kernel's log, or /dev/kmsg; None reads no log.
        pages: URLs of the metrics pages of DCGM's exporter and of node-problem-detector.
        hang_timeout: Seconds without a step after which a busy engine counts as hanging; 0 turns
            this check off.
    """

    kernel_log: Path | None = None
    pages: Sequence[str] = ()
    hang_timeout: float = 0.0


class FaultWatch:
    """A reader of all sources of faults, which passes their contents to the detectors."""

    def __init__(self, sources: FaultSources, own_page: str | None) -> None:
        """Open the kernel log. `own_page` is the URL of Triton's metrics.

        Raises:
            OSError: The log cannot be read.
        """
        self._own_page = own_page
        self._log = KernelLog(sources.kernel_log) if sources.kernel_log is not None else None
        self._gpus = _visible_gpus() if self._log is not None else ()
        self._detectors = {url: GpuFaultDetector() for url in sources.pages}
        self._progress = ProgressDetector(sources.hang_timeout) if sources.hang_timeout and own_page else None

    def find_fault(self, now: float) -> str | None:
        """Return a description of a new fault of the machine, or None."""
        if self._log is not None and (fault := find_xid(self._log.lines(), self._gpus)):
            return fault
        for url, detector in self._detectors.items():
            if (page := _read_page(url)) is not None and (fault := detector.update(parse_samples(page), now)):
                return fault
        return None

    def find_hang(self, now: float) -> str | None:
        """Return the name of a model whose engine hangs, or None."""
        if self._progress is None or self._own_page is None:
            return None
        page = _read_page(self._own_page)
        return None if page is None else self._progress.update(parse_samples(page), now)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _read_page(url: str) -> str | None:
    import httpx

    async def read() -> bytes:
        async with asyncio.timeout(_PAGE_TIMEOUT), httpx.AsyncClient(verify=_tls()) as client:
            return await fetch_bounded(client, url, _PAGE_BYTES)

    try:
        return asyncio.run(read()).decode(errors="replace")
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError, ValueError):
        return None


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context that all pages share, because creating one takes 20 ms."""
    return ssl.create_default_context()


def _visible_gpus() -> Sequence[str]:
    """Return the PCI addresses of the GPUs that this container sees; empty if they are unknown."""
    command = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
