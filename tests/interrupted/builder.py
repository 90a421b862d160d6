"""A process that has loaded everything `llmops build` loads, and forks one real command for each line of JSON.

Loading takes seconds and a build of a tiny model a fraction of one: so every point of a build can be tried. A command
runs in a process group of its own. `stop` says where it is stopped, from inside, as a signal from outside would:

    {"argv": [...], "env": {...}, "stop": {"call": "module:name", "number": 2, "signal": 9}}

stops the group at the second call of that function. `disk` gives the command a disk of its own,
{"at": folder, "kilobytes": 300}. The answer tells exit code, output, and what lay on that disk in the end.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import llmops.cli.build
import llmops.cli.main  # noqa: F401
from tests.support.forked_cli import run_here


def warm_up(source: str) -> None:
    """One build for each target: whatever is imported late is here when a fork begins."""
    import torch

    from llmops.build.job.build_engine import build
    from llmops.build.quality import reference_answers
    from llmops.build.spec import BuildSpec

    # a fork has no threads but its own: torch must not have started any
    torch.set_num_threads(1)
    texts = reference_answers.bundled_texts
    reference_answers.bundled_texts = lambda name: [text[:100] for text in texts(name)][:3]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["LLMOPS_CACHE"] = scratch
        for target in ("pytorch", "tensorrt"):
            output = Path(scratch) / target
            build(BuildSpec(source, output, target=target, quant="fp8", calib_size=1, calib_seq_len=16))
    # what is frozen no collection touches, so that forks go on sharing its memory
    gc.freeze()


def serve() -> None:
    warm_up(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def run(order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        out, err, count = (Path(scratch) / name for name in ("out", "err", "count"))
        pid = os.fork()
        if pid == 0:
            child(order, out, err, count)
        if "pid_file" in order:
            Path(order["pid_file"]).write_text(str(pid))
        _, status = os.waitpid(pid, 0)
        report = json.loads(count.read_text()) if count.exists() else {}
        return {"code": os.waitstatus_to_exitcode(status), "out": out.read_text(), "err": err.read_text(), **report}


def child(order: dict[str, Any], out: Path, err: Path, count: Path) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(order.get("env", {}))
    if disk := order.get("disk"):
        own_disk(disk["at"], disk["kilobytes"])
    if "call" in (order.get("stop") or {}):
        trap(order["stop"])
    code = run_here(order["argv"])
    count.write_text(json.dumps({"left": sorted(map(str, Path(disk["at"]).rglob("*"))) if disk else []}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def own_disk(at: str, kilobytes: int) -> None:
    """A tmpfs in a mount namespace of this process; exit code 77 where that is not allowed. The build would refuse so
    small a disk at once, so its check is taken out."""
    import llmops.build.job.build_engine

    llmops.build.job.build_engine.check_space = lambda *args: None
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_namespace, private_recursive = 0x10000000, 0x00020000, 0x44000
    options = f"size={kilobytes}k".encode()
    if (
        libc.unshare(new_namespace | (new_user if os.getuid() else 0))
        or libc.mount(b"none", b"/", None, private_recursive, None)
        or libc.mount(b"none", at.encode(), b"tmpfs", 0, options)
    ):
        os._exit(77)


def trap(stop: dict[str, Any]) -> None:
    module, _, names = stop["call"].partition(":")
    *owners, name = names.split(".")
    place = importlib.import_module(module)
    for owner in owners:
        place = getattr(place, owner)
    original, calls = getattr(place, name), [0]

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == stop.get("number", 1):
            os.kill(0, stop["signal"])
        return original(*args, **kwargs)

    setattr(place, name, stopping)


if __name__ == "__main__":
    serve()
