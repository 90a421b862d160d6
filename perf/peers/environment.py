"""A virtual environment per peer under .cache/peers, made once from public wheels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llmops.errors import MissingDependencyError

ROOT = Path(".cache/peers")


def peer_python(name: str, steps: list[list[str]]) -> Path:
    """The interpreter of peer `name`. `steps`: argument lists for `pip install`, run in order if it is not there yet.

    BENCH_PEER_<NAME> names an interpreter to use instead. Raises MissingDependencyError when pip fails.
    """
    given = os.environ.get(f"BENCH_PEER_{name.upper()}")
    if given:
        return Path(given)
    python, done = ROOT / name / "bin" / "python", ROOT / name / ".installed"
    if done.is_file():
        return python
    print(f"  installing {name} into {ROOT / name} …", flush=True)
    _run([sys.executable, "-m", "venv", str(ROOT / name)], name)
    for step in steps:
        _run([str(python), "-m", "pip", "install", "-q", "--no-compile", *step], name)
    done.touch()
    return python


def _run(command: list[str], name: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise MissingDependencyError(f"{name} cannot be installed: {result.stderr.strip().splitlines()[-1:]}.")
