"""Tests of messages to users who may not read or write what a command needs.

The message names the owner and says what to do.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmops.build.engine_folder.build_lock import exclusive_build
from llmops.errors import LlmopsError
from llmops.model_repository.doctor import machine
from tests.support.processes import as_user

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody gets to, unlike pytest's own."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    yield root
    for path in root.iterdir():
        path.chmod(0o755)
    shutil.rmtree(root)


def test_doctor_in_an_environment_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytriton")
    wheel = folder / "tritonserver"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "bin" / "tritonserver").touch()
    wheel.chmod(0o000)
    monkeypatch.setattr(machine.installation, "find_wheel", lambda: wheel)
    monkeypatch.setattr(machine.installation, "CONTAINER_ROOT", folder / "none")

    def fix() -> None:
        raise LlmopsError(next(check.fix for check in machine.check_machine() if check.name == "Triton"))

    assert as_user(NOBODY, fix) == (
        f"{wheel}/bin/tritonserver cannot be read by this user (Permission denied): run llmops as the user who "
        "installed it, or install llmops in an environment of your own"
    )


def test_upgrade_of_an_engine_that_cannot_be_written(folder: Path) -> None:
    engine = folder / "engine"
    engine.mkdir()
    engine.chmod(0o555)

    def upgrade() -> None:
        with exclusive_build(engine, print, inside=True):
            raise AssertionError("it was written to")

    # another folder would not help: what is there is rewritten
    said = f"{engine} cannot be written (Permission denied); make it writable, or run this as its owner."
    assert as_user(NOBODY, upgrade) == said
