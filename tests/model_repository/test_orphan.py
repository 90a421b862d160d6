"""An engine whose server was killed while it waited for it."""

import contextlib
import os
import select
import signal
import subprocess
import sys

from tests.support.model_code import version_folder

STUB = """
import threading
from llmops_process import kill_after_parent
kill_after_parent(0.1)
print("waits", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
SERVER = """
import subprocess, sys, threading
# from a thread that is over, as Triton starts its stubs
def start():
    global stub
    stub = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
thread = threading.Thread(target=start)
thread.start(); thread.join()
print(stub.stdout.readline().strip(), stub.pid, flush=True)
stub.wait()
"""


def test_it_ends_after_its_server(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(version_folder("tensorrt_llm")))
    server = subprocess.Popen([sys.executable, "-c", SERVER, STUB], stdout=subprocess.PIPE, text=True)
    said, pid = server.stdout.readline().split()
    assert said == "waits"
    stub = os.pidfd_open(int(pid))
    try:
        ended = select.poll()
        ended.register(stub, select.POLLIN)
        assert ended.poll(500) == []
        server.kill()
        server.wait()
        assert ended.poll(60_000) != []
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(stub, signal.SIGKILL)
        os.close(stub)
