"""Runs `llmops` commands in forks of one process that has loaded all of them.

The start of an interpreter with the imports of a command takes a second of the processor, a fork some milliseconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__]
    root = Path(__file__).parents[2]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    atexit.register(server.communicate)
    return server


def run(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `llmops` with these arguments and `text` on its standard input, and return its output and exit code."""
    words, server = [str(one) for one in arguments], _server()
    order = {"argv": words, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env), "in": text}
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    return subprocess.CompletedProcess(words, answer["code"], answer["out"], answer["err"])


def _serve() -> None:
    import gc

    import llmops.gateway.app
    import llmops.perf.bench  # noqa: F401
    from llmops.cli.main import COMMANDS, cli

    for name in COMMANDS:
        cli.get_command(None, name)  # type: ignore[arg-type]
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        with tempfile.TemporaryDirectory() as scratch:
            files = [Path(scratch, name) for name in ("in", "out", "err")]
            files[0].write_text(order["in"])
            pid = os.fork()
            if pid == 0:
                _child(order, files)
            _, status = os.waitpid(pid, 0)
            out, err = (file.read_text() for file in files[1:])
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "out": out, "err": err}), flush=True)


def _child(order: dict, files: list[Path]) -> None:
    for number, file in enumerate(files):
        handle = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
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
        os._exit(code)


if __name__ == "__main__":
    _serve()
