"""Triton's log lines as a person reads them, and the one sentence that says why a server did not start."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# glog: level, month+day, time, thread id, file:line] "message"
_GLOG = re.compile(r"^(?P<level>[IWEF])\d{4} (?P<time>[\d:]{8})\.\d+ +\d+ (?P<where>[\w./]+:\d+)\] (?P<message>.*)$")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
# logged at each start, of no use to a reader
_NOISE = (
    "Collecting metrics for GPU",
    "Collecting CPU metrics",
    "Started GRPCInferenceService",
    "Started HTTPService",
    "Started Metrics Service",
    "TRITONBACKEND_ModelInstanceInitialize",
    "Pinned memory pool disabled",
    "CUDA memory pool disabled",
    "Unable to allocate pinned",
    "Failed to query GPU",
    "CudaDriverHelper has not been initialized",
    "unable to create stream",
    "no pinned memory pool",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "live models and",
    "Found 0 model versions",
)


@dataclass(frozen=True)
class LogLine:
    """One line of Triton's output; `level` is info, warning, error or fatal, "" for continuation lines and tables."""

    time: str
    level: str
    where: str
    message: str

    @property
    def is_noise(self) -> bool:
        if not self.message.strip() or (not self.level and self.message.lstrip()[0] in "+|"):
            return True
        return any(text in self.message for text in _NOISE)

    def __str__(self) -> str:
        if not self.level:
            return f"{'':17}{self.message}"
        return f"{self.time} {self.level:7} {self.message}"


def parse_line(line: str) -> LogLine:
    match = _GLOG.match(line)
    if match is None:
        return LogLine("", "", "", line)
    message = match["message"]
    if len(message) > 1 and message[0] == message[-1] == '"':
        message = message[1:-1]
    message = message.replace("\\n", "\n").replace('\\"', '"')
    return LogLine(match["time"], _LEVELS[match["level"]], match["where"], message)


# logged once by our engine model when its engine thread has ended: ENDED of llmops_engine/loop.py
_ENGINE_ENDED = re.compile(r"(?P<model>\S+): the engine has ended: (?P<reason>.*)", re.DOTALL)


def parse_engine_death(line: LogLine) -> tuple[str, str] | None:
    """(model, reason) where the line says that an engine has ended."""
    match = _ENGINE_ENDED.search(line.message) if line.level == "error" else None
    return (match["model"], match["reason"]) if match else None


_LOAD_FAILED = re.compile(r"failed to load '(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.*)", re.DOTALL)


def explain_failure(lines: Iterable[LogLine]) -> str | None:
    """The cause in one sentence: the first model that failed and why, else the first error. None if nothing failed."""
    errors = [line for line in lines if _is_error(line)]
    for line in errors:
        match = _LOAD_FAILED.search(line.message)
        if match:
            return f"model {match['model']} did not load: {_root_cause(match['reason'])}"
    # "Poll failed for model directory 'x': ..." and the like
    return _root_cause(errors[0].message) if errors else None


def failed_on_lock(lines: Iterable[LogLine]) -> bool:
    """Whether the first thing that went wrong was a lock in the Python backend's shared memory: an upstream fault that
    a start hits now and then, whatever the repository (triton-inference-server/server issues 5949 and 8882)."""
    return (explain_failure(lines) or "").endswith("'boost::interprocess::lock_exception'")


# what the C and C++ libraries say before they abort
_ABORT = re.compile(
    r"terminate called|what\(\):|double free|corrupt|[Aa]ssertion .* failed|stack smashing|out of memory"
)


def last_error(lines: Iterable[LogLine]) -> LogLine | None:
    """The last line that may be why a server ended."""
    return next((line for line in reversed(list(lines)) if _is_error(line)), None)


def _is_error(line: LogLine) -> bool:
    """Not counting those that such a machine logs at every start."""
    said = line.level in ("error", "fatal") or (not line.level and _ABORT.search(line.message))
    return bool(said) and not line.is_noise


def _root_cause(reason: str) -> str:
    """Of a Triton status with a Python traceback, only the exception's own message."""
    head, _, _ = reason.partition("\n\nAt:")
    head = re.sub(r"^(Internal|Invalid argument|Unavailable|Not found): ", "", head.strip())
    return re.sub(r"^(\w+\.)*\w*(Error|Exception|Refused): ", "", head).strip().rstrip(".")
