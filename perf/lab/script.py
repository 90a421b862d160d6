"""What makes a benchmark a program of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from llmops.perf.lab.figures import Section


def script(measure: Callable[[Path], Section], argument: str, text: str) -> click.Command:
    """A command with one path, `argument`, that `measure` takes; the figures are printed as they come."""

    def run(**given: Path) -> None:
        measure(given[argument.lower()])

    path = click.Argument([argument.lower()], type=click.Path(path_type=Path, exists=True))
    return click.Command(None, callback=run, params=[path], help=text)
