"""The `trtllm-build` step of a job.

The step can run here with log and progress, or on another machine by build.sh.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from llmops.build.engine_folder.manifest import FILE_NAME
from llmops.build.environment import installed_version as distribution_version
from llmops.build.environment import version_in
from llmops.build.progress import Progress
from llmops.build.targets.nvidia import process_guard
from llmops.build.trtllm.container_images import TrtllmImage, bind_mount
from llmops.build.trtllm.image_selection import check_trtllm_installed
from llmops.errors import BuildError, MissingDependencyError

PROGRAM = "trtllm-build"
LOG = "trtllm-build.log"
SCRIPT = "build.sh"
#: Default of trtllm-build's --output_timing_cache, a path in the folder where the program runs.
TIMING_CACHE = "model.cache"
CHECKPOINT_DIR, ENGINE_DIR = "checkpoint", "model"
#: First of the two log lines per rank of tensorrt_llm/_common.py, serialize_engine.
_RANK_DONE = re.compile(r"Serializing engine to .*rank\d+\.engine")


#: Shell commands that set `complete` in engine.json, after a check that every rank has its engine.
_RECORD = f"""\
for shard in {CHECKPOINT_DIR}/rank*.safetensors; do
  rank=$(basename "$shard" .safetensors)
  test -s "{ENGINE_DIR}/$rank.engine" || {{ echo "{PROGRAM} left no {ENGINE_DIR}/$rank.engine" >&2; exit 1; }}
done
sed 's/"complete": false/"complete": true/' {FILE_NAME} > .{FILE_NAME}.part
mv .{FILE_NAME}.part {FILE_NAME}
"""


def script(argv: Sequence[str], image: TrtllmImage) -> str:
    """Return build.sh, which finishes the engine folder that contains it.

    The script runs inside the image, or on any machine with trtllm-build.
    """
    command = " \\\n  ".join(flag_lines(argv))
    return (
        "#!/bin/sh\n"
        f"# Finishes this engine folder. Needs trtllm-build of TensorRT-LLM {image.tensorrt_llm} and GPUs, as in\n"
        f"# {image.reference}.\n"
        "# `llmops build --resume DIR` does the same, with progress.\n"
        'set -eu\ncd "$(dirname "$0")"\n'
        f"rm -rf {ENGINE_DIR} && mkdir {ENGINE_DIR}\n"
        f"{command}\n"
        f"{_RECORD}"
    )


def write_script(folder: Path, argv: Sequence[str], image: TrtllmImage) -> None:
    """Write build.sh into the engine folder `folder`."""
    path = folder / SCRIPT
    path.write_text(script(argv, image))
    path.chmod(0o755)


def flag_lines(argv: Sequence[str]) -> list[str]:
    """Return a line per flag of the command, with the values of the flag."""
    lines = [shlex.quote(argv[0])]
    for word in argv[1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def docker_command(folder: Path, image: TrtllmImage) -> list[str]:
    """Return the docker command that runs the step in the image, as the owner of the folder.

    The image does not know this user. The command therefore sets HOME, below which flashinfer
    creates folders when it is imported (flashinfer/jit/core.py:
    os.makedirs(FLASHINFER_WORKSPACE_DIR)), and the user's name, which torch reads.
    """
    owner = f"{os.getuid()}:{os.getgid()}"
    # Without --init, the shell would be the container's first process, which ignores the SIGTERM
    # after a Ctrl-C.
    flags = ["--rm", "--init", "--gpus", "all", "--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
    home = ["--env", "HOME=/tmp", "--env", "USER=llmops"]
    mount = bind_mount(str(folder.absolute()), "/engine")
    inside = [*home, "--mount", mount, image.reference, "sh", f"/engine/{SCRIPT}"]
    return ["docker", "run", *flags, "--user", owner, *inside]


def installed_version() -> str | None:
    """Return the TensorRT-LLM version of the installed `trtllm-build`, or None.

    The result is None if the program is missing or its version is unknown.
    """
    if shutil.which(PROGRAM) is None:
        return None
    beside = Path(shutil.which(PROGRAM) or PROGRAM).with_name("python3")
    versions = (version_in(str(python), "tensorrt_llm") for python in (beside, "python3"))
    return distribution_version("tensorrt_llm") or next(filter(None, versions), None)


def check_version(image: TrtllmImage) -> None:
    """Check the installed trtllm-build.

    Raises:
        MissingDependencyError: The program is not installed.
        VersionMismatchError: The program has another version.
    """
    if shutil.which(PROGRAM) is None:
        raise MissingDependencyError(
            f"{PROGRAM} is not on PATH; run this in {image.reference}, or add --in-container on a machine with docker."
        )
    version = installed_version()
    if version is not None:
        check_trtllm_installed("tensorrt", image.tensorrt_llm, version)


def run(argv: Sequence[str], folder: Path, ranks: int, log_path: Path, progress: Progress) -> None:
    """Run the step in the engine folder `folder`, with the output in `log_path`.

    Raises:
        BuildError: The step failed. The message has the last lines of the log.
    """
    for written in (log_path, folder / TIMING_CACHE):
        written.unlink(missing_ok=True)  # The file may be a link, in a folder from elsewhere.
    with progress.stage(f"Building {ranks} engine{'s' if ranks > 1 else ''}", total=ranks), log_path.open("w") as log:
        process = _start(argv, folder)
        tail: deque[str] = deque(maxlen=12)
        try:
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                tail.append(line.rstrip())
                if _RANK_DONE.search(line):
                    progress.advance()
            code = process.wait()
        finally:
            _end(process)
        if code != 0:
            raise BuildError(_failure(argv, code, list(tail), log_path))
    check_engine(folder / ENGINE_DIR, ranks, log_path)


def _start(argv: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start the guard with the command. The guard runs while its standard input is open."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", process_guard.__file__, *argv], cwd=folder, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    """Close the guard's standard input, and wait for the guard.

    The guard then ends a program that still runs, so the wait is longer than the guard's grace
    time.
    """
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=2 * process_guard.GRACE)


def _failure(argv: Sequence[str], code: int, tail: list[str], log_path: Path) -> str:
    ended = f"was killed by signal {code - 128}" if code > 128 else f"ended with code {code}"
    text = "\n  ".join(tail) or "(it printed nothing)"
    reason = "; the disk is full" if any("No space left" in line for line in tail) else ""
    return f"{Path(argv[0]).name} {ended}{reason}. The end of {log_path}:\n  {text}"


def check_engine(engine: Path, ranks: int, log_path: Path) -> None:
    """Raise BuildError unless config.json and one non-empty engine file per rank exist."""
    expected = ["config.json", *(f"rank{rank}.engine" for rank in range(ranks))]
    bad = [name for name in expected if not (engine / name).is_file() or (engine / name).stat().st_size == 0]
    if bad:
        raise BuildError(f"{PROGRAM} succeeded but wrote no {bad[0]} to {engine.name}; see {log_path}.")
