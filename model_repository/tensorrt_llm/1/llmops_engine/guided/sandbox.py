"""A separate process that compiles grammars first: it can be killed when one takes too long or too much memory.

`python -m llmops_engine.guided.sandbox MODEL_FOLDER VOCAB_SIZE NICENESS` reads guides from its
input, each a line with a JSON list of kind, text and the CPU seconds that a token may take, and
answers each with one JSON object. `GrammarSandbox` is the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from .walk_costs import WalkCosts

# how often the process is checked while it works (s)
_POLL = 0.05
_PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class GrammarLimits:
    """CPU seconds to compile, to join a batch and per token; bytes of memory for the compiled grammar, and for all
    that are kept in `total`.

    `waiting`: how many may wait to be compiled, in all and `waiting_per_caller`. `niceness` of whatever compiles: at
    19, the lowest priority, running streams hardly notice.
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
    """The costs of one grammar, those of `WalkCosts` among them; `problem` is the reason why it does not compile."""

    problem: str | None = None
    join_seconds: float = 0.0
    token_seconds: float = 0.0
    mean_seconds: float = 0.0
    grows: bool = False
    memory: int = 0


class GrammarLimitError(Exception):
    """A grammar went over a limit while it compiled; `slow`: over that of time."""

    def __init__(self, message: str, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow


class GrammarSandbox:
    """The process, started when needed. Used by one thread, but `close` and `end` may come from another."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False
        self._starting = threading.Lock()

    def measure(self, guide: tuple[str, str], limits: GrammarLimits) -> GrammarMeasurement:
        """Raises GrammarLimitError; the process is then gone."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            start = process_usage(process.pid)
            process.stdin.write(json.dumps([*guide, limits.token_seconds]).encode() + b"\n")
            process.stdin.flush()
            while not select.select([process.stdout], [], [], _POLL)[0]:
                _check(process_usage(process.pid), start, limits)
            measured = GrammarMeasurement(**json.loads(process.stdout.readline()))
            if process_usage(process.pid)[1] > limits.total:
                self.close()  # it never forgets a grammar
            return measured
        except GrammarLimitError:
            self.close()
            raise
        except (OSError, ValueError):
            self.close()
            raise RuntimeError("the process that compiles it ended") from None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def end(self) -> None:
        """Close, and start no other process."""
        with self._starting:
            self._over = True
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            with self._starting:
                if self._over:
                    raise RuntimeError("the engine ends")
                process = self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True
                )
            assert process.stdout is not None
            process.stdout.readline()  # says that it is ready
        return self._process


def _check(now: tuple[float, int], start: tuple[float, int], limits: GrammarLimits) -> None:
    if now[0] - start[0] > limits.compile_seconds:
        raise GrammarLimitError(f"the grammar takes more than {limits.compile_seconds:g} s to compile", slow=True)
    if now[1] - start[1] > limits.memory:
        raise GrammarLimitError(f"the grammar takes more than {limits.memory >> 20} MiB of memory")


def process_usage(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process. Raises OSError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE


def command(model_path: Path, vocab_size: int, niceness: int) -> tuple[list[str], dict[str, str]]:
    """How to start the process, from wherever this package was imported."""
    arguments = [_python(), "-m", "llmops_engine.guided.sandbox", str(model_path), str(vocab_size), str(niceness)]
    return arguments, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def _python() -> str:
    """In Triton's stub `sys.executable` may be the stub; the interpreter lies beside the environment it uses."""
    own = Path(sys.prefix) / "bin" / "python3"
    return str(own) if own.exists() else sys.executable


def _serve(lines: BinaryIO, answer: BinaryIO, pipeline: Any) -> None:
    pipeline.compile(("regex", "a"))  # the first one reads the whole vocabulary
    answer.write(b"ready\n")
    answer.flush()
    for line in lines:
        kind, text, token_seconds = json.loads(line)
        before = process_usage(os.getpid())[1]
        problem = pipeline.compile((kind, text))
        memory = max(process_usage(os.getpid())[1] - before, 0)
        costs = WalkCosts() if problem else pipeline.follow((kind, text), token_seconds)
        measured = GrammarMeasurement(problem, memory=memory, **asdict(costs))
        answer.write(json.dumps(asdict(measured)).encode() + b"\n")
        answer.flush()


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[3]))
    # the libraries write their warnings to standard output too
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    import openvino_genai as genai

    from .openvino import GrammarPipeline

    _serve(sys.stdin.buffer, answer, GrammarPipeline(genai.Tokenizer(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
