"""`llmops diff`: the changes that an llmops.yaml would make."""

import json
from pathlib import Path

import click

from llmops.cli.options import described_options
from llmops.cli.output import print_line
from llmops.errors import ServerError


@click.command("diff")
@described_options
@click.option("--url", help="The gateway that runs.  [default: where the file says]")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when something would change.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
def command(file: Path, profile: str | None, url: str | None, exit_code: bool, as_json: bool) -> None:
    """Show what llmops.yaml would change: engines to build again, and models that are not served.

    Each line begins with + for something missing, - for something that the file does not describe,
    or ~ for a difference.
    """
    from llmops.cli.openai_client import ChatClient
    from llmops.cli.service.changes import engine_changes, served_model_changes
    from llmops.cli.service.service_file import read

    loaded = read(file, profile)
    changes = list(engine_changes(loaded))
    address = url or f"http://{loaded.settings.host}:{loaded.settings.port}"
    try:
        changes += served_model_changes(loaded, ChatClient(address, timeout=10).models())
    except ServerError as error:
        print_line(f"Only the engines are compared, because the gateway does not answer: {error.message}", err=True)
    if as_json:
        click.echo(json.dumps([change._asdict() for change in changes], indent=2, default=str))
    for change in () if as_json else changes:
        print_line(str(change))
    if not changes and not as_json:
        click.echo("Nothing would change.")
    if changes and exit_code:
        click.get_current_context().exit(1)
