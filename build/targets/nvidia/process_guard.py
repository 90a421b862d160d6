"""Runs a program so that nothing of it outlives us: `python guard.py PROGRAM ARGS…`, with a pipe as standard input.

trtllm-build starts workers of its own. Guard and program are in a session of their own, which a Ctrl-C or `kill -9`
for llmops' process group does not reach; when the pipe's other end closes, for whatever reason, all of it is ended.
Knows nothing of llmops, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE = 10.0


def main(argv: list[str]) -> int:
    """The program's exit code, 128 + signal for one that was killed, 127 for one that cannot be started."""
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
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(timeout=GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
