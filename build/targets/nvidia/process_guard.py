"""Run a program in its own session and kill the session when standard input closes.

Usage: `python process_guard.py PROGRAM ARGS…`.

trtllm-build starts workers, and no worker may outlive llmops. Guard and program run in a new
session, which Ctrl-C or `kill -9` for llmops' process group does not reach. The guard imports no
module of llmops, so that it starts at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

#: Seconds between SIGTERM and SIGKILL, in which the workers can remove their files.
GRACE = 10.0


def main(argv: list[str]) -> int:
    """Run the program and return its exit code.

    The exit code is 128 + signal if a signal killed the program, and 127 if the program cannot be
    started.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=_default_signals)
    except OSError as error:
        print(f"{argv[0]} could not be started: {error}", flush=True)
        return 127
    threading.Thread(target=_end_with_parent, args=(program,), daemon=True).start()
    code = program.wait()
    return 128 - code if code < 0 else code


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent(program: subprocess.Popen[bytes]) -> None:
    """End the guard's process group, which has the program, when standard input closes.

    The group gets SIGTERM, and SIGKILL when the program has ended or GRACE seconds have passed.
    """
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(timeout=GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
