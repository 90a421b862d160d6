"""Start-up time of the command line, and time and memory of cold builds.

Goals: `llmops --help` in 200 ms, a cold int8 build of SmolLM2 in 25 s, a repeated build in 1 s, and
a peak memory of a build below 1.6 times the size of the checkpoint.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.perf.lab.checkpoints import make_checkpoint
from llmops.perf.lab.figures import Section

PEAK_AIM = 1.6  # Peak memory as a multiple of the checkpoint's size.
# This build behaves as if there were too little memory for golden answers, which builds record only
# if there is enough.
_LITTLE_MEMORY = """
from llmops.build.targets.openvino import native_golden_answers
from llmops.cli.main import main
native_golden_answers.available_memory = lambda: 0
main()
"""
CONDITIONS = "Wall clock and largest resident set of the processes; weights of the larger checkpoints are random."


def program() -> str:
    """Return the path of the program `llmops` in this Python environment."""
    return str(Path(sys.executable).parent / "llmops")


def build_command(checkpoint: str, output: Path, quant: str = "int8") -> list[str]:
    """Return the command line of a build for the embedded engine."""
    return [program(), "build", checkpoint, "--quant", quant, "-o", str(output)]


def usage(command: list[str], cache: Path | None = None) -> tuple[float, float]:
    """Run `command` to its end, with its caches in new folders below `cache`.

    Return the wall-clock time in seconds and the largest resident set in MiB. Raise
    CalledProcessError if the command fails.
    """
    own = {"LLMOPS_CACHE": str(cache), "XDG_CACHE_HOME": f"{cache}-xdg"} if cache else {}
    quiet = subprocess.DEVNULL
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **own})
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begun
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return seconds, used.ru_maxrss / 1024


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`.

    Random checkpoints get the tokenizer of `engine`.
    """
    tokenizer = engine / EngineManifest.load(engine).tokenizer.directory
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        usage([program(), "--help"])
        best, _ = min(usage([program(), "--help"]) for _ in range(5))
        section.add("llmops --help, best of 5", 1000 * best, "ms", 200)
        cold, _ = usage(build_command("smollm2", folder / "engine"), folder / "cache")
        section.add("llmops build smollm2 --quant int8, cold", cold, "s", 25)
        again, _ = usage(build_command("smollm2", folder / "engine"), folder / "cache")
        section.add("the same build again", again, "s", 1)
        _memory("safetensors, float16", make_checkpoint(folder / "hf", tokenizer), "int8", folder, section)
        _memory("GGUF, Q4_1", make_checkpoint(folder / "large.gguf"), "int4", folder, section)


def _memory(name: str, checkpoint: Path, quant: str, folder: Path, section: Section) -> None:
    """Add to `section` a build's peak memory as a multiple of the checkpoint's size.

    A build must never hold two copies of a checkpoint, except for golden answers, which run the
    unchanged checkpoint.
    """
    files = [checkpoint] if checkpoint.is_file() else list(checkpoint.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files) / 2**20
    _, *arguments = build_command(str(checkpoint), folder / f"engine-{quant}", quant)
    _, peak = usage([sys.executable, "-c", _LITTLE_MEMORY, *arguments], folder / "cache")
    section.add(f"{name}: peak memory / its size", peak / size, "×", PEAK_AIM)
