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
_PARTS = ("build", "cli", "control", "deploy", "gateway", "llmops", "model_repository", "perf", "store", "tests")
_NAMES = [f"{fault.number}-{fault.file.rsplit('/', 1)[-1]}" for fault in FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=_NAMES)
def test_the_mend_is_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.mended) == 1


@pytest.mark.skipif(not os.environ.get("LLMOPS_FAULTS"), reason="LLMOPS_FAULTS=1 puts each fault back")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=_NAMES)
def test_a_test_notices_the_fault(fault: Fault, tmp_path: Path) -> None:
    for part in _PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / file.name)
    # the package is a folder of links, as setup.cfg makes it of an installed one
    package = tmp_path / "as-installed" / "llmops"
    package.mkdir(parents=True)
    for part in (*_PARTS[:-1], *os.listdir(tmp_path / "llmops")):
        if part != "llmops":
            place = tmp_path / part if part in _PARTS else tmp_path / "llmops" / part
            (package / part).symlink_to(place)
    path = tmp_path / fault.file
    path.write_text(path.read_text().replace(fault.mended, fault.before))
    environment = {**os.environ, "PYTHONPATH": f"{package.parent}:{tmp_path}", "LLMOPS_FAULTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *fault.tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-2000:]
