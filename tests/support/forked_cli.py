"""Runs `llmops` commands in forks of one process that has loaded all of them.

The start of an interpreter with the imports of a command takes two seconds of the processor, a fork some milliseconds.
A client sends arguments, folder and environment with its own standard streams. It receives the process id, and in the
end the exit code.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

#: Modules that commands import when they run: those of a store take a second.
LATE = (
    *("aiosqlite", "alembic.command", "alembic.config", "httpcore", "uvloop"),
    *("sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.dialects.postgresql.asyncpg"),
    *("llmops.control.app", "llmops.perf.clients.openai", "llmops.perf.verify.run"),
)


@functools.cache
def server_address() -> str:
    """Return the address of this process's server, which is started once and ends with the process."""
    folder = tempfile.TemporaryDirectory(prefix="llmops-forks-")
    address = f"{folder.name}/socket"
    root = Path(__file__).parents[2]
    # it ends with its standard input, also when a signal ends this process; the thread that starts it may end before
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-m", __name__, address], stdin=pipe, stdout=pipe, cwd=root)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(folder.cleanup)
    atexit.register(server.terminate)
    return address


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `llmops` with these arguments and `text` on its standard input, and return its output and exit code."""
    words = [str(one) for one in arguments]
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile() as err:
        given.write(text)
        given.seek(0)
        streams = [given.fileno(), out.fileno(), err.fileno()]
        folder, environment = str(cwd or Path.cwd()), dict(os.environ if env is None else env)
        code = ask(server_address(), words, folder, environment, streams)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read().decode())


def ask(address: str, arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> int:
    """Return the exit code of a command whose standard streams are these file descriptors."""
    with _ordered(address, arguments, folder, environment, streams) as connection:
        connection.recv(4)
        code = connection.recv(4)
    return int.from_bytes(code, "big", signed=True) if code else 1


def _ordered(
    address: str, arguments: list[str], folder: str, environment: Mapping[str, str], streams: list[int]
) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    order = json.dumps({"argv": arguments, "cwd": folder, "env": dict(environment)}).encode()
    socket.send_fds(connection, [len(order).to_bytes(4, "big")], streams)
    connection.sendall(order)
    return connection


class ForkedProcess:
    """A running command with the attributes and methods of `subprocess.Popen` that tests use.

    It ends with the test process. Without a file for its output `stdout` is a pipe.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int | None = None, address: str = ""
    ) -> None:
        self.args, self.returncode = ["llmops", *arguments], None
        self.stdout: IO[bytes] | None = None
        write = output
        if write is None:
            read, write = os.pipe()
            self.stdout = os.fdopen(read, "rb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        streams = [nothing, write, write]
        self._connection = _ordered(address or server_address(), [*arguments], os.getcwd(), environment, streams)
        os.close(nothing)
        if output is None:
            os.close(write)
        self.pid = int.from_bytes(self._connection.recv(4), "big")

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(None)
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int.from_bytes(self._connection.recv(4) or b"\1", "big", signed=True)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(address: str) -> None:
    import llmops.gateway.app
    import llmops.perf.bench  # noqa: F401
    from llmops.cli.main import COMMANDS, cli

    # not above: a program without our libraries uses the rest
    from llmops.process import end_with_parent

    for name in COMMANDS:
        cli.get_command(None, name)  # type: ignore[arg-type]
    for name in LATE:
        importlib.import_module(name)
    gc.freeze()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready = select.select([listener, ended, sys.stdin], [], [])[0]
            if sys.stdin in ready:
                return
            if ended in ready:
                os.read(ended, 4096)
                _report(running)
            if listener in ready:
                connection, _ = listener.accept()
                parent = os.getpid()
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listener, *running.values()):
                        other.close()
                    end_with_parent(parent, signal.SIGTERM)
                    _command(connection)
                running[pid] = connection


def _report(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of the processes that have ended; a signal's is negative."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with running.pop(found[0]) as connection, suppress(OSError):
                connection.sendall(os.waitstatus_to_exitcode(found[1]).to_bytes(4, "big", signed=True))


def _command(connection: socket.socket) -> None:
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += connection.recv(1 << 20)
    order = json.loads(data)
    connection.sendall(os.getpid().to_bytes(4, "big"))
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    code = run_here(order["argv"])
    # as at the end of an interpreter, without the destruction of all modules
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_here(arguments: list[str]) -> int:
    """Run `llmops` with these arguments in this process, and return its exit code."""
    sys.argv = ["llmops", *arguments]
    try:
        from llmops.cli.main import main

        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    return 1


if __name__ == "__main__":
    _serve(sys.argv[1])
