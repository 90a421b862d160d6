"""`llmops chart`: values for the Helm chart from llmops.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import yaml

from llmops.output_files import write_text

if TYPE_CHECKING:
    from llmops.cli.service.chart import Planned
    from llmops.cli.service.description import Described


@click.command("chart")
@click.option("-f", "--file", type=click.Path(path_type=Path, dir_okay=False), default="llmops.yaml", show_default=True)
@click.option("--profile", help="A profile of the file.")
@click.option("--mounted", default="/models", show_default=True, help="Where the chart mounts its claim of engines.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write here.  [default: stdout]")
def command(file: Path, profile: str | None, mounted: str, output: Path | None) -> None:
    """Values for deploy/helm/llmops: a pool of engines and a build for each model, and the gateway's settings.

    `replicas: auto` is planned. Secrets, claims and what a cluster has otherwise are yours to add: see the chart's
    values.yaml.
    """
    from llmops.cli.service.chart import values_of
    from llmops.cli.service.description import read

    described = read(file, profile)
    values = values_of(described, mounted, lambda model: _planned(described, model))
    text = yaml.safe_dump(values, sort_keys=False, width=120)
    if output is None:
        click.echo(text, nl=False)
        return
    write_text(output, text)
    click.echo(f"Wrote {output}. Next: helm install NAME deploy/helm/llmops -f {output}")


def _planned(described: Described, model: str) -> Planned:
    """How many the plan has of the layout that the file has, and what each keeps up with."""
    from llmops.build.plan.report.rules import rules
    from llmops.cli import plan
    from llmops.cli.service.chart import Planned
    from llmops.cli.service.flags import of_plan

    with plan.command.make_context("chart", [], default_map=of_plan(described, model)) as context:
        found = plan.make_plan(context.params.pop("checkpoint"), context.params)
    return Planned(found.best.replicas, found.best.capacity / found.best.replicas, rules(found, model)["groups"])
