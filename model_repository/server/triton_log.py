"""Parsing of Triton's log, and the reason why a server did not start or has ended."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from llmops.untrusted_text import escape_unsafe

#: Maximum number of characters of a message that are shown. A traceback of a model that does not
#: load has some thousands.
MAX_MESSAGE_LENGTH = 32_000

# glog: level, month+day, time, thread id, file:line] "message"
_GLOG = re.compile(r"^(?P<level>[IWEF])\d{4} (?P<time>[\d:]{8})\.\d+ +\d+ (?P<where>[\w./]+:\d+)\] (?P<message>.*)$")
_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
# Parts of lines that Triton logs at every start and that help no reader.
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
#: The exception that the Python backend logs when a lock in its shared memory fails.
LOCK_EXCEPTION = "boost::interprocess::lock_exception"


@dataclass(frozen=True)
class LogLine:
    """One line of Triton's output.

    `level` is info, warning, error or fatal, and empty for continuation lines and tables. `where`
    is FILE:LINE of the code that logged the message.
    """

    time: str
    level: str
    where: str
    message: str

    @property
    def is_noise(self) -> bool:
        """Return True if Triton logs this line at every start."""
        if not self.message.strip() or (not self.level and self.message.lstrip()[0] in "+|"):
            return True
        return any(text in self.message for text in _NOISE)

    def __str__(self) -> str:
        # a message may contain the text of a request, whose lines must not look like new log lines
        text = escape_unsafe(self.message, MAX_MESSAGE_LENGTH, lines=True).replace("\n", f"\n{'':17}")
        return f"{self.time:8} {self.level:7} {text}"


def parse_line(line: str) -> LogLine:
    """Parse a line of Triton's output."""
    match = _GLOG.match(line)
    if match is None:
        return LogLine("", "", "", line)
    message = match["message"]
    if len(message) > 1 and message[0] == message[-1] == '"':
        message = message[1:-1]
    message = message.replace("\\n", "\n").replace('\\"', '"')
    return LogLine(match["time"], _LEVELS[match["level"]], match["where"], message)


# our engine model logs this line once when its engine has ended (ENGINE_ENDED_MESSAGE in
# llmops_engine/loop.py)
_ENGINE_ENDED = re.compile(r"(?P<model>\S+): the engine has ended: (?P<reason>.*)", re.DOTALL)


def parse_engine_death(line: LogLine) -> tuple[str, str] | None:
    """Return the model and the reason if the line reports that an engine has ended, or None."""
    # match only at the beginning, because other errors may contain a client's text
    match = _ENGINE_ENDED.match(line.message) if line.level == "error" else None
    return (match["model"], match["reason"]) if match else None


# A worker of TensorRT-LLM's LLM API logs the first line (1.2.1 executor/worker.py, worker_main).
# The thread of mpi4py that cannot spawn the workers logs the second (mpi4py/futures,
# _manager_spawn).
_WORKER_FAILED = re.compile(
    r"Failed to initialize executor (?P<rank>on rank \d+: .*)|^mpi4py\.MPI\.Exception: (?P<spawn>MPI_ERR_\w+.*)"
)


def parse_worker_failure(line: LogLine) -> str:
    """Return the end of the sentence "TensorRT-LLM failed …" if workers failed to load.

    The text says on which rank and why. The result is empty for every other line.
    """
    match = _WORKER_FAILED.search(line.message)
    if match is None:
        return ""
    return (match["rank"] or f"to start its workers: {match['spawn']}").strip().rstrip(".")


# the PyTorch backend of TensorRT-LLM logs this line (1.2.1 _torch/pyexecutor/py_executor.py,
# _event_loop_wrapper)
_LOOP_ENDED = re.compile(r"^\[[^\]]*\] \[TRT-LLM\] (?:\[[^\]]*\] ?)*Error in event loop: ?(?P<reason>.*)")


def parse_loop_end(line: LogLine) -> str:
    """Return the reason why a TensorRT-LLM worker's loop has ended, or an empty text.

    The result is empty for every other line.
    """
    match = _LOOP_ENDED.match(line.message)
    return (match["reason"].strip().rstrip(".") or "an error without a text") if match else ""


_LOAD_FAILED = re.compile(r"failed to load '(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.*)", re.DOTALL)


def explain_failure(lines: Iterable[LogLine]) -> str | None:
    """Return the reason why a server failed, or None if no line is an error.

    The reason is the first model that did not load and its error, or otherwise the first error.
    """
    errors = [line for line in lines if _is_error(line)]
    for line in errors:
        match = _LOAD_FAILED.search(line.message)
        if match:
            return f"model {match['model']} did not load: {_advised(_root_cause(match['reason']))}"
    # otherwise errors such as "Poll failed for model directory 'x': ..."
    return _root_cause(errors[0].message) if errors else None


def _advised(cause: str) -> str:
    """Return the cause, replaced by advice of llmops where the library's message has none."""
    if "Incorrect weights in bin file" in cause:
        return (
            "the engine's weights are incomplete; build the engine again with `llmops build --force`, and the "
            "repository with `llmops repo`"
        )
    return cause


def failed_on_lock(lines: Iterable[LogLine]) -> bool:
    """Return True if Triton failed on a lock of its Python backend's shared memory.

    This upstream fault happens at some starts, with any repository (triton-inference-server/server
    issues 5949 and 8882).
    """
    return (explain_failure(lines) or "").endswith(f"'{LOCK_EXCEPTION}'")


def failed_on_port(lines: Iterable[LogLine]) -> bool:
    """Return True if the server ended because another process listens on one of its ports."""
    return any("address already in use" in line.message.lower() for line in lines)


# messages that C and C++ libraries write before they abort
_ABORT = re.compile(
    r"terminate called|what\(\):|double free|corrupt|[Aa]ssertion .* failed|stack smashing|out of memory"
)


def last_error(lines: Iterable[LogLine]) -> LogLine | None:
    """Return the last line that may explain why a server ended, or None."""
    return next((line for line in reversed(list(lines)) if _is_error(line)), None)


def _is_error(line: LogLine) -> bool:
    """Return True for an error that Triton does not log at every start."""
    is_error = line.level in ("error", "fatal") or (not line.level and _ABORT.search(line.message))
    return bool(is_error) and not line.is_noise


def _root_cause(reason: str) -> str:
    """Return the exception's own message from a Triton status with a Python traceback."""
    head, _, _ = reason.partition("\n\nAt:")
    head = re.sub(r"^(Internal|Invalid argument|Unavailable|Not found): ", "", head.strip())
    return re.sub(r"^(\w+\.)*\w*(Error|Exception): ", "", head).strip().rstrip(".")
