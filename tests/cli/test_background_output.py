"""Programs that serve do not wait for the reader of their output, and lose no line without saying so."""

import errno
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from llmops.background_output import MAX_WAITING_BYTES, BackgroundFile
from tests.support.waiting import GENEROUS

BEGIN = (
    "import logging, os, sys\nfrom llmops.gateway.logging_setup import configure_logging\nconfigure_logging('info')\n"
)


def run(program: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", BEGIN + program], timeout=GENEROUS, **streams)


def test_output_and_log_keep_their_order_up_to_the_exit():
    """Each of two forks has its own writer, and repeats no line of its parent."""
    program = """
from llmops.gateway.supervisor import Supervisor
def count(who):
    for number in range(2000):
        logging.info("%s %d", who, number)
        print(f"{who} {number}")
count("parent")
supervisor = Supervisor(2)
def work(index):
    count(f"worker{index}")
    supervisor._stopping = True
    if index:
        raise ValueError("the last line")
supervisor._stopping = False
import llmops.gateway.supervisor as module
supervisor._replace_one = lambda: [os.waitpid(supervisor._workers.pop(one)[0], 0) for one in [*supervisor._workers]]
supervisor.run(work)
count("end")
sys.exit("Error: the end")
"""
    done = run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 1
    assert lines[-1] == "Error: the end"
    assert sum(line.endswith("ValueError: the last line") for line in lines) == 1
    for who in ("parent", "worker0", "worker1", "end"):
        told = [line.split(": ")[-1] for line in lines if f"{who} " in line]
        assert told == [f"{who} {number}" for number in range(2000) for _ in range(2)]


@pytest.fixture
def pipe():
    """A pipe that is full: its reader stands still."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    full = 0
    while True:
        try:
            full += os.write(write, b"." * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    yield read, write, full
    os.close(read)
    os.close(write)


def test_lines_beyond_the_bound_are_dropped_and_counted(pipe):
    read, write, full = pipe
    file = BackgroundFile(write)
    line = b"x" * 1023 + b"\n"
    written = 2 * MAX_WAITING_BYTES // len(line)
    for _ in range(written):
        file.write(line)
    taken = b""
    while b"Warning" not in taken or not taken.endswith(b".\n"):
        taken += os.read(read, 65536)
    file.write(b"the next line\n")
    taken = taken[full:] + os.read(read, 65536)
    kept = MAX_WAITING_BYTES // len(line) + 1
    warning = b"Warning: this output could not be written in time; lines missing above: %d.\n" % (written - kept)
    assert taken == line * kept + warning + b"the next line\n"


def test_a_full_disk_loses_lines_and_says_so(monkeypatch, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        file = BackgroundFile(log.fileno())
        with monkeypatch.context() as patch:
            patch.setattr("os.write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            file.write(b"lost\n")
            assert file.mark().wait(GENEROUS)
        file.write(b"kept\n")
        assert file.mark().wait(GENEROUS)
    kept, warning = (tmp_path / "log").read_text().splitlines()
    assert kept == "kept"
    assert warning.endswith("lines missing above: 1.")


def test_a_process_exits_although_its_output_cannot_be_written(pipe):
    _, write, _ = pipe
    done = run("logging.info('a line'); print('another'); sys.exit('the last')", stdout=write, stderr=write)
    assert done.returncode == 1
