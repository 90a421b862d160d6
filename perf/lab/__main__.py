"""Run all benchmarks, each in a process of its own: `python -m llmops.perf.lab ENGINE [NAME…]` (`make bench`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

#: The benchmarks, and the arguments of each that needs more than its name.
BENCHMARKS = ("hot_path", "streams", "overload", "start_up", "policies", "usage", "plan_accuracy", "engine_path")
WITH_ENGINE = frozenset({"hot_path", "streams", "overload", "engine_path"})


@click.command()
@click.argument("engine", type=click.Path(path_type=Path, exists=True))
@click.argument("names", nargs=-1, type=click.Choice(BENCHMARKS))
def main(engine: Path, names: tuple[str, ...]) -> None:
    """Run the benchmarks NAMES, or all of them, with ENGINE."""
    for name in names or BENCHMARKS:
        arguments = [str(engine)] if name in WITH_ENGINE else []
        subprocess.run([sys.executable, "-m", f"llmops.perf.lab.{name}", *arguments], check=False)


if __name__ == "__main__":
    main()
