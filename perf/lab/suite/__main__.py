"""All benchmarks, into docs/performance.md: `python -m llmops.perf.lab.suite` (`make bench`), in about half an hour.

Each part runs in a process of its own with a limit of its own: one that cannot run here (a wheel that does not
install, say) or hangs is named in the page with its reason and ends no other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from llmops.errors import InputError
from llmops.model_repository.server.processes import with_parent_death_signal
from llmops.perf.lab.harness.figures import keep
from llmops.perf.lab.harness.processes import descendants
from llmops.perf.lab.peers.environment import install
from llmops.perf.lab.suite import results
from llmops.perf.lab.suite.page import page, table
from llmops.perf.lab.suite.parts import Part, parts

ENGINE = Path(".cache/bench/smollm2-int8")
REPORT = Path("docs/performance.md")
WHOLE_SECONDS = 40 * 60


@click.command()
@click.option("--engine", type=click.Path(path_type=Path), default=ENGINE, help="Engine folder; built when missing.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=REPORT, show_default=True)
@click.option("--only", multiple=True, help="Run only this part; the page keeps what the others said last. Repeatable.")
@click.option("--child", hidden=True, help="Measure this part here and now.")
def main(engine: Path, output: Path, only: tuple[str, ...], child: str | None) -> None:
    """Run the benchmarks and write the page."""
    known = {part.name: part for part in parts()}
    if unknown := {*only, *([child] if child else [])} - set(known):
        raise InputError(f"There is no part {', '.join(sorted(unknown))}; parts are {', '.join(known)}.")
    if child:
        keep(results.path(known[child]))
        known[child].measure(engine).write_json(results.path(known[child]))
        return
    chosen = [part for part in known.values() if (part.name in only if only else part.included)]
    _prepare(engine, {part.peer for part in chosen if part.peer})
    earlier = output.read_text("utf-8") if output.is_file() else ""
    figures = output.with_suffix(".csv")
    before = figures.read_text("utf-8") if figures.is_file() else ""
    deadline = time.monotonic() + (sum(part.seconds for part in chosen) if only else WHOLE_SECONDS)
    for part in chosen:
        # a part that takes longer on this machine takes no time from the others
        deadline += max(0.0, _run(part, engine, deadline) - part.seconds)
        output.write_text(page(list(known.values()), earlier), "utf-8")
        figures.write_text(table(list(known.values()), before), "utf-8")
    print(f"Wrote {output}")


def _prepare(engine: Path, peers: set[str]) -> None:
    """Download and build what is needed once, outside the measured time."""
    if not (engine / "engine.json").is_file():
        engine.parent.mkdir(parents=True, exist_ok=True)
        program = str(Path(sys.executable).parent / "llmops")
        subprocess.run([program, "build", "smollm2", "--quant", "int8", "-o", str(engine)], check=True)
    for name, why in install(peers).items():
        print(f"{name} is left out: {why}", flush=True)


def _run(part: Part, engine: Path, deadline: float) -> float:
    """Measure one part in a process of its own. Returns the seconds it took."""
    results.forget(part)
    begun = time.monotonic()
    seconds = min(part.seconds, deadline - begun)
    if seconds < part.seconds / 3:
        results.set_missing(part, "no time was left for it")
        return 0.0
    command = [sys.executable, "-m", "llmops.perf.lab.suite", "--engine", str(engine), "--child", part.name]
    process = subprocess.Popen(with_parent_death_signal(command), stderr=subprocess.PIPE, text=True)
    try:
        errors = _wait(process, part, seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        _cut(part, time.monotonic() - begun)
        return time.monotonic() - begun
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        print(errors, file=sys.stderr)
        lines = errors.strip().splitlines() or [f"exit {process.returncode}"]
        _cut(part, time.monotonic() - begun, lines[-1])
    return time.monotonic() - begun


def _wait(process: subprocess.Popen[str], part: Part, seconds: float) -> str:
    """What the part wrote to stderr. Raises TimeoutExpired when it is over its limit: `seconds`, and more once it has
    said how far it is, because then this machine is only slow."""
    begun, limit = time.monotonic(), seconds
    while True:
        try:
            return process.communicate(timeout=max(0.0, begun + limit - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            longer = results.allowance(part, seconds)
            if longer <= limit:
                raise
            limit = longer


def _cut(part: Part, seconds: float, error: str | None = None) -> None:
    """Keep what an unfinished part measured, and say that it is not all; or say why there is nothing."""
    why = f"it failed: {error}" if error else f"it was not done after {seconds:.0f} s"
    kept = results.section(part)
    if kept is None or not kept.figures:
        results.forget(part)
        results.set_missing(part, why)
        return
    kept.lack(f"not everything was measured: {why}; what it had by then is kept")
    kept.write_json(results.path(part))


def _end(process: subprocess.Popen[str]) -> None:
    """The part with its servers, which may be in sessions of their own."""
    pids = descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
