"""Runs `llmops` commands in forks of one process that has loaded all of them.

The start of an interpreter with the imports of a command takes a second of the processor, a fork some milliseconds.
A client sends arguments, folder and environment with its own standard streams, and receives the exit code.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def server_address() -> str:
    """Return the address of this process's server, which is started once and ends with the process."""
    folder = tempfile.TemporaryDirectory(prefix="llmops-forks-")
    address = f"{folder.name}/socket"
    root = Path(__file__).parents[2]
    server = subprocess.Popen([sys.executable, "-m", __name__, address], stdout=subprocess.PIPE, cwd=root)
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
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        order = json.dumps({"argv": arguments, "cwd": folder, "env": environment}).encode()
        socket.send_fds(connection, [len(order).to_bytes(4, "big")], streams)
        connection.sendall(order)
        code = connection.recv(4)
    return int.from_bytes(code, "big") if code else 1


def _serve(address: str) -> None:
    import gc
    import signal

    import llmops.gateway.app
    import llmops.perf.bench  # noqa: F401
    from llmops.cli.main import COMMANDS, cli

    for name in COMMANDS:
        cli.get_command(None, name)  # type: ignore[arg-type]
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _command(connection)
            connection.close()


def _command(connection: socket.socket) -> None:
    size, streams, _, _ = socket.recv_fds(connection, 4, 3)
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += connection.recv(1 << 20)
    order = json.loads(data)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if number == 0 else "w") for number in range(3))
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.argv = ["llmops", *order["argv"]]
    code = 1
    try:
        from llmops.cli.main import main

        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(code.to_bytes(4, "big"))
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
