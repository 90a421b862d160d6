"""`llmops chart`: values for the Helm chart from llmops.yaml, and the schema of its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmops.cli.options import FILE_PATH, described_options, reject_other_options
from llmops.cli.output import print_line
from llmops.errors import InputError
from llmops.output_files import write_text
from llmops.yaml_files import write_yaml

if TYPE_CHECKING:
    from llmops.cli.service.helm_values import PlannedReplicas
    from llmops.cli.service.service_file import LoadedService


@click.command("chart")
@described_options
@click.option("--gateway-image", metavar="REF", help="The pushed image of Dockerfile.gateway, with its digest.")
@click.option("--engine-image", metavar="REF", help="The pushed image of Dockerfile.trtllm, with its digest.")
@click.option("--build-image", metavar="REF", help="The pushed image of Dockerfile.build, with its digest.")
@click.option("--claim", default="llmops-models", help="The PersistentVolumeClaim of engines.")
@click.option("--mounted", default="/models", help="The path at which pods mount the claim.")
@click.option("-o", "--output", type=FILE_PATH, help="Write to this file.  [default: stdout]")
@click.option("--schema-only", is_flag=True, help="Write the JSON Schema of the chart's values instead.")
def command(
    file: Path,
    profile: str | None,
    gateway_image: str | None,
    engine_image: str | None,
    build_image: str | None,
    claim: str,
    mounted: str,
    output: Path | None,
    schema_only: bool,
) -> None:
    """Write values for deploy/helm/llmops.

    The values cover pools, builds, the gateway's settings and what pods may connect to.

    Replicas that the file sets to `auto` are planned. What is left to do before `helm install` is
    printed to standard error. docs/kubernetes.md goes through the installation.
    """
    from llmops.cli.service.helm_schema import chart_schema
    from llmops.cli.service.helm_values import ClusterResources, make_helm_values
    from llmops.cli.service.service_file import read

    if schema_only:
        reject_other_options("--schema-only writes a schema that fits all values", "output", "schema_only")
        _write(json.dumps(chart_schema(), indent=1) + "\n", output)
        return
    loaded = read(file, profile)
    images = {"gateway": gateway_image, "engine": engine_image, "build": build_image}
    named = {name: reference for name, reference in images.items() if reference is not None}
    for name, reference in named.items():
        if "@sha256:" not in reference:
            raise InputError(
                f"--{name}-image {reference} has no digest, which the chart needs; write "
                "REGISTRY/NAME[:TAG]@sha256:DIGEST, as `docker push` prints it."
            )
    cluster = ClusterResources(named, claim, mounted.rstrip("/"))
    chart = make_helm_values(loaded, cluster, lambda model: _planned(loaded, model))
    _write(write_yaml(chart.values), output)
    for note in chart.notes:
        print_line(note, err=True)
    if output is not None:
        print_line(f"Next: helm install NAME deploy/helm/llmops -f {output}")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    write_text(output, text)
    print_line(f"Wrote {output}.")


def _planned(loaded: LoadedService, model: str) -> PlannedReplicas:
    """Return a model's planned replicas for the layout in the file."""
    from llmops.build.plan.report.recording_rules import render_rules
    from llmops.cli import plan
    from llmops.cli.service.command_defaults import plan_defaults
    from llmops.cli.service.helm_values import PlannedReplicas

    with plan.command.make_context("chart", [], default_map=plan_defaults(loaded, model)) as context:
        found = plan.make_plan(context.params.pop("checkpoint"), context.params)
    return PlannedReplicas(
        found.best.replicas, found.best.capacity / found.best.replicas, render_rules(found, model)["groups"]
    )
