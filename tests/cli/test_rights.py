"""Tests of messages to users who may not read or write what a command needs.

The message names the owner and says what to do.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmops.build.engine_folder.build_lock import exclusive_build
from llmops.errors import LlmopsError
from llmops.model_repository.doctor import machine

NOBODY = 65534


def as_nobody(work: Callable[[], object]) -> str:
    """The error of `work` for a user who owns nothing here, in a process of its own: root may do everything."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        said = "no error"
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            said = str(work())
        except LlmopsError as error:
            said = error.message
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writable, said.encode())
            os._exit(0)
    os.close(writable)
    _, status = os.waitpid(child, 0)
    with os.fdopen(readable) as pipe:
        return pipe.read() or f"the process ended with status {status} and said nothing"


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
    said = as_nobody(lambda: next(check.fix for check in machine.check_machine() if check.name == "Triton"))
    assert said == (
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
    assert (
        as_nobody(upgrade)
        == f"{engine} cannot be written (Permission denied); make it writable, or run this as its owner."
    )
