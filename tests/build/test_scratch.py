"""Temporary folders live only as long as the command that made them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmops.build.engine_folder.atomic_folder import scratch_folder

HOLDER = """
import sys
from llmops.build.engine_folder.atomic_folder import scratch_folder
with scratch_folder("held-") as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("x" * 100000)
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_it_is_gone_at_the_end_and_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("a b-") as folder:
        (folder / "file").touch()
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), scratch_folder("x-"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_after_a_kill_of_the_whole_group(tmp_path: Path, number: int) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().strip())
    assert (folder / "deep" / "file").is_file()
    os.killpg(holder.pid, number)
    holder.communicate(timeout=120)
    deadline = time.monotonic() + 120
    while folder.exists():
        assert time.monotonic() < deadline, "the folder outlived its command"
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []
