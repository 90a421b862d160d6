"""The command that runs the benchmarks and writes their rows of docs/performance.md.

The command is `python -m llmops.perf.lab [NAME…]` (`make bench`). Each of several benchmarks runs
in a separate process, so that no benchmark is affected by the memory, threads or caches of another.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import click

from llmops.perf.lab.figures import Section
from tests.support.engines import smollm2_engine

#: The module name and the row title of each benchmark. A module has the text CONDITIONS and the
#: function `measure(engine, section)`, which adds the figures to the section.
BENCHMARKS = {
    "hot_path": "Hot path",
    "streams": "Many streams, long prompts",
    "engine_path": "Engine path",
    "engine_reports": "Engine reports",
    "usage": "Usage",
    "start_up": "Start-up and build",
    "policies": "Fleet policies",
    "overload": "Overload",
    "canary_judge": "Canary judge",
    "herd": "Herd",
    "safety_rules": "Safety rules",
    "plan_accuracy": "Planner",
    "chat_page": "Chat page",
}
PAGE = Path("docs", "performance.md")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option(
    "--engine", type=click.Path(path_type=Path, exists=True), help="The engine folder; an engine of SmolLM2 by default."
)
def main(names: tuple[str, ...], engine: Path | None) -> None:
    """Run the benchmarks NAME, or all of them, and update docs/performance.md."""
    if unknown := set(names) - set(BENCHMARKS):
        raise click.UsageError(f"Unknown benchmark {', '.join(unknown)}. Choose from {', '.join(BENCHMARKS)}.")
    engine = engine or smollm2_engine()
    if len(names) == 1:
        _run(names[0], engine)
        return
    command = [sys.executable, "-m", "llmops.perf.lab", "--engine", str(engine)]
    failed = [name for name in names or BENCHMARKS if subprocess.run([*command, name], check=False).returncode]
    if failed:
        raise click.ClickException(f"{', '.join(failed)} ended with an error, printed above; their rows are unchanged.")


def _run(name: str, engine: Path) -> None:
    """Run one benchmark, and write its row of docs/performance.md."""
    benchmark = importlib.import_module(f"llmops.perf.lab.{name}")
    with Section(BENCHMARKS[name], benchmark.CONDITIONS) as section:
        benchmark.measure(engine, section)
    row = section.row(f"make bench ARGS={name}")
    page = PAGE.read_text()
    PAGE.write_text(re.sub(rf"^\| {re.escape(BENCHMARKS[name])} \|.*$", lambda _: row, page, flags=re.M))


if __name__ == "__main__":
    main()
