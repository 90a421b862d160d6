"""Tests of one module in a forked process of their own, with the module as it is or with a fault in it.

The fault is put in at import: no file changes. The parent has imported what is big and not under test, and none of the
project's code, so that the child starts quickly and imports the changed module wherever it is used.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Sequence
from importlib.metadata import entry_points

import fastapi  # noqa: F401
import hypothesis
import numpy  # noqa: F401
import pytest
import tokenizers  # noqa: F401
import tritonclient.grpc.aio  # noqa: F401
import uvicorn  # noqa: F401

from llmops.perf.lab.mutation.changed import put_in
from llmops.perf.lab.mutation.mutants import Mutant
from llmops.perf.lab.mutation.settings import ROOT

# bytes of a child: a fault may make a loop endless that fills memory
MEMORY = 4 << 30


def prepare() -> None:
    """Imports pytest's plugins in the parent, and keeps what is imported out of the children's garbage collections."""
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()


def start(tests: Sequence[str], mutant: Mutant | None, seconds: float, output: str = os.devnull) -> int:
    """Forks; the child's pid. `seconds` of CPU time; as waiting takes none, the child's life is bounded too. Its exit
    status is pytest's: 0 when all tests passed."""
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(to, 1)
    os.dup2(to, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) * 10)
    os._exit(_pytest(tests, mutant))


def _pytest(tests: Sequence[str], mutant: Mutant | None) -> int:
    os.chdir(ROOT)
    if mutant is not None:
        put_in(mutant.file, mutant.source)
    # the same examples each time, none from other runs, and no search for the smallest
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("mutation")
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "timeout=0", "--disable-warnings"]
    try:
        return int(pytest.main([*options, *tests]))
    except BaseException as error:
        print(repr(error))
        return 3
