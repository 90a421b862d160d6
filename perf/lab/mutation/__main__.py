"""`python -m llmops.perf.lab.mutation [MODULE…] [--all]`: exit status 1 when too many faults go unnoticed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from llmops.perf.lab.mutation.mutants import Mutant, every, sample
from llmops.perf.lab.mutation.settings import ROOT, Settings, read_settings
from llmops.perf.lab.mutation.trial import prepare, start

# seconds of CPU that the tests may take as they are; a mutant has five times what they took
LONGEST = 120.0


@click.command()
@click.argument("modules", nargs=-1)
@click.option("--all", "whole", is_flag=True, help="Every fault, not a sample.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True)
def main(modules: tuple[str, ...], whole: bool, jobs: int) -> None:
    """Put small faults into MODULES (default: all of tests/mutation.yaml) and see whether their tests notice."""
    settings = read_settings()
    unknown = set(modules) - set(settings.modules)
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: not in tests/mutation.yaml; give them tests there.")
    files = list(modules or settings.modules)
    prepare()
    tests = {file: tuple(settings.modules[file]) for file in files}
    seconds = _unchanged(set(tests.values()), jobs)
    mutants = [mutant for file in files for mutant in _of(settings, file, whole)]
    tried = [mutant for mutant in mutants if (mutant.was, mutant.now) not in settings.equivalent.get(mutant.file, ())]
    tasks = ((one, start(tests[one.file], one, 5 + 5 * seconds[tests[one.file]])) for one in tried)
    missed = []
    for mutant, status, _ in _results(tasks, jobs):
        if status == 0:
            missed.append(mutant)
            click.echo(str(mutant))
    _report(files, mutants, tried, missed)
    raise SystemExit(len(missed) > (1 - settings.bar) * len(tried))


def _of(settings: Settings, file: str, whole: bool) -> list[Mutant]:
    source = (ROOT / file).read_text()
    return every(file, source) if whole else sample(file, source, settings.sample, settings.seed)


def _unchanged(groups: set[tuple[str, ...]], jobs: int) -> dict[tuple[str, ...], float]:
    """CPU seconds of each group of tests as they are. Raises SystemExit where they fail."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = {tests: os.path.join(folder, str(number)) for number, tests in enumerate(sorted(groups))}
        tasks = ((tests, start(tests, None, LONGEST, output)) for tests, output in outputs.items())
        for tests, status, used in _results(tasks, jobs):
            if status != 0:
                raise SystemExit(f"{' '.join(tests)} fail as they are:\n{Path(outputs[tests]).read_text()}")
            seconds[tests] = used
    return seconds


def _results(tasks: Iterable, jobs: int) -> Iterator[tuple]:
    """Of (what, pid) pairs, made as there is room: what, exit status, CPU seconds, as they end."""
    running: dict[int, object] = {}
    tasks = iter(tasks)
    while True:
        while len(running) < jobs and (task := next(tasks, None)):
            running[task[1]] = task[0]
        if not running:
            return
        pid, status, usage = os.wait4(-1, 0)
        if pid in running:
            yield running.pop(pid), status, usage.ru_utime + usage.ru_stime


def _report(files: list[str], mutants: list[Mutant], tried: list[Mutant], missed: list[Mutant]) -> None:
    def count(these: list[Mutant], file: str) -> int:
        return sum(mutant.file == file for mutant in these)

    click.echo(f"{'tried':>5} {'caught':>6} {'equivalent':>10}")
    for file in files:
        ran = count(tried, file)
        click.echo(f"{ran:5} {ran - count(missed, file):6} {count(mutants, file) - ran:10}  {file}")
    caught = len(tried) - len(missed)
    share = caught / len(tried) if tried else 1.0
    click.echo(f"{len(tried):5} {caught:6} {len(mutants) - len(tried):10}  {share:.1%}")


if __name__ == "__main__":
    main()
