"""`llmops upgrade`: move an engine to another release of TensorRT-LLM."""

from pathlib import Path

import click

from llmops.cli.options import EXISTING_FOLDER
from llmops.cli.output import print_line


@click.command()
@click.argument("engine", type=EXISTING_FOLDER)
@click.option(
    "--to",
    required=True,
    metavar="VERSION",
    help="Release of TensorRT-LLM to serve ENGINE with: 1.3, or exactly 1.2.1.",
)
@click.option("--dry-run", is_flag=True, help="Print what would change; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
def command(engine: Path, to: str, dry_run: bool, as_json: bool) -> None:
    """Show what changes when another TensorRT-LLM serves ENGINE, and rewrite ENGINE for it.

    The output also names the features that are lost.

    The weights of a `pytorch` engine stay as they are. A TensorRT engine cannot be upgraded: the
    command that builds the model again is printed instead.
    """
    import json

    from llmops.build.job.upgrade import apply_upgrade, plan_upgrade

    if dry_run:
        upgrade = plan_upgrade(engine, to)
    else:
        upgrade = apply_upgrade(engine, to, lambda line: print_line(line, err=True))
    version = upgrade.manifest.tensorrt_llm
    if as_json:
        found = {"tensorrt_llm": version, "changes": upgrade.changes, "lost": upgrade.lost, "gained": upgrade.gained}
        click.echo(json.dumps({**found, "image": upgrade.image.serving("pytorch"), "written": not dry_run}, indent=2))
        return
    for title, lines in (("Changes", upgrade.changes), ("Lost", upgrade.lost), ("Gained", upgrade.gained)):
        if lines:
            for line in (f"{title}:", *(f"  {line}" for line in lines)):
                print_line(line)
    verb = "would be" if dry_run else "is now"
    reference = upgrade.image.serving("pytorch")
    print_line(f"{engine} {verb} for TensorRT-LLM {version}, in {reference}.")
    if recipe := upgrade.image.recipe(reference):
        print_line(f"The image: {recipe}")
    click.echo("Make its repository again: llmops repo")
