"""A separate process that compiles grammars first.

The process can be killed when a grammar takes too much time or memory.

    python -m llmops_engine.guided.sandbox MODEL_FOLDER VOCAB_SIZE NICENESS PARENT_PID

reads guides from its input, each a line with a JSON list of kind, text and the CPU seconds that a
token may take, and answers each with one JSON object. `GrammarSandbox` is the other end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llmops_process import Process, end_with_parent, read_process, stop_child

from .walk_costs import WalkCosts

#: Seconds between two checks of a compiling process against its limits: a small part of the time
#: limit.
_POLL = 0.05


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of time, memory and queue length for grammars.

    Attributes:
        compile_seconds: Maximum CPU seconds to compile a grammar.
        join_seconds: Maximum CPU seconds by which a request with a compiled grammar delays the step
            in which it joins the batch.
        token_seconds: Maximum CPU seconds to apply the grammar to one token.
        memory: Maximum bytes of one compiled grammar.
        total: Maximum bytes of all compiled grammars that are kept.
        niceness: The niceness of compiler processes. At 19, the lowest priority, they hardly delay
            running streams.
        waiting: Maximum number of grammars that wait to be compiled.
        waiting_per_caller: Maximum number of one caller's grammars that wait to be compiled.
    """

    compile_seconds: float = 20.0
    join_seconds: float = 0.25
    token_seconds: float = 0.05
    memory: int = 512 << 20
    total: int = 2 << 30
    niceness: int = 19
    waiting: int = 256
    waiting_per_caller: int = 64


@dataclass(frozen=True)
class GrammarMeasurement:
    """The costs of one grammar, or the reason why it does not compile.

    `problem` is the reason, or None. `memory` is in bytes; the other fields are explained in
    `WalkCosts`.
    """

    problem: str | None = None
    join_seconds: float = 0.0
    token_seconds: float = 0.0
    mean_seconds: float = 0.0
    grows: bool = False
    memory: int = 0


class GrammarLimitError(Exception):
    """An error for a grammar that exceeded a limit while it compiled.

    `slow` is True if the exceeded limit was the time.
    """

    def __init__(self, message: str, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow


class GrammarSandbox:
    """A compiler process that starts with the first measurement.

    One thread calls `measure`; any other thread may call `close` and `end`.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        """Create the sandbox. `sandbox_command` returns the arguments; no process starts yet."""
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._starting = threading.Lock()

    def measure(self, guide: tuple[str, str], limits: GrammarLimits) -> GrammarMeasurement:
        """Return the costs of a grammar.

        Raises:
            GrammarLimitError: The grammar exceeded a limit of time or memory, and the process was
                killed.
        """
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            before = read_process(process.pid)
            process.stdin.write(json.dumps([*guide, limits.token_seconds]).encode() + b"\n")
            process.stdin.flush()
            while not select.select([process.stdout], [], [], _POLL)[0]:
                _check_limits(before, read_process(process.pid), limits)
            measured = GrammarMeasurement(**json.loads(process.stdout.readline()))
            if read_process(process.pid).resident_bytes > limits.total:
                self.close()  # the library never frees a compiled grammar, so only a new process frees the memory
            return measured
        except GrammarLimitError:
            self.close()
            raise
        except (OSError, ValueError):
            self.close()
            raise RuntimeError("the process that compiles it ended") from None

    def close(self) -> None:
        """Kill the process. The next measurement starts another."""
        process, self._process = self._process, None
        if process is not None:
            stop_child(process)

    def end(self) -> None:
        """Kill the process, and never start another process."""
        with self._starting:
            self._ended = True
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            with self._starting:
                if self._ended:
                    raise RuntimeError("the engine is shutting down")
                process = self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True
                )
            assert process.stdout is not None
            process.stdout.readline()  # wait until the process is ready
        return self._process


def _check_limits(before: Process, now: Process, limits: GrammarLimits) -> None:
    if now.cpu_seconds - before.cpu_seconds > limits.compile_seconds:
        raise GrammarLimitError(
            f"the grammar takes more than {limits.compile_seconds:g} s to compile; simplify it", slow=True
        )
    if now.resident_bytes - before.resident_bytes > limits.memory:
        raise GrammarLimitError(f"the grammar takes more than {limits.memory >> 20} MiB of memory; shorten it")


def sandbox_command(model_path: Path, vocab_size: int, niceness: int) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a sandbox process."""
    # Inside Triton, `sys.executable` may be the Python backend's stub, which cannot run modules.
    # The interpreter lies in the stub's environment.
    own = Path(sys.prefix) / "bin" / "python3"
    python = str(own) if own.exists() else sys.executable
    arguments = [str(model_path), str(vocab_size), str(niceness), str(os.getpid())]
    command = [python, "-m", "llmops_engine.guided.sandbox", *arguments]
    # PYTHONSAFEPATH keeps Python from importing modules of the folder in which the server started
    return command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}


def _serve(lines: BinaryIO, answer: BinaryIO, pipeline: Any) -> None:
    pipeline.compile(("regex", "a"))  # the first grammar makes the compiler read the whole vocabulary
    answer.write(b"ready\n")
    answer.flush()
    for line in lines:
        kind, text, token_seconds = json.loads(line)
        before = read_process(os.getpid()).resident_bytes
        problem = pipeline.compile((kind, text))
        memory = max(read_process(os.getpid()).resident_bytes - before, 0)
        costs = WalkCosts() if problem else pipeline.follow((kind, text), token_seconds)
        measured = GrammarMeasurement(problem, memory=memory, **asdict(costs))
        answer.write(json.dumps(asdict(measured)).encode() + b"\n")
        answer.flush()


def main() -> None:
    """Compile and measure the grammars that arrive on standard input."""
    end_with_parent(int(sys.argv[4]), signal.SIGKILL)
    os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[3]))
    # the libraries write their warnings to standard output as well
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    import openvino_genai as genai

    from .openvino import GrammarPipeline

    _serve(sys.stdin.buffer, answer, GrammarPipeline(genai.Tokenizer(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
