"""Each fault of tests/trtllm/faults.py, put back, fails a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trtllm.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
_PARTS = ("build", "cli", "control", "gateway", "model_repository", "perf", "store")
_NAMES = [f"{fault.number}-{fault.file.rsplit('/', 1)[-1]}" for fault in FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=_NAMES)
def test_the_mend_is_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.mended) == 1


@pytest.mark.skipif(not os.environ.get("LLMOPS_FAULTS"), reason="LLMOPS_FAULTS=1 puts each fault back")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=_NAMES)
def test_a_test_notices_the_fault(fault: Fault, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    # a whole package: what is beside it in the project would be taken from the project itself
    package = shutil.copytree(ROOT / "llmops", tmp_path / "llmops", ignore=ignored)
    for part in _PARTS:
        shutil.copytree(ROOT / part, package / part, ignore=ignored)
        (tmp_path / part).symlink_to(package / part)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / file.name)
    path = tmp_path / fault.file
    path.write_text(path.read_text().replace(fault.mended, fault.before))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "LLMOPS_FAULTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *fault.tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:]
