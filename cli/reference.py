"""The list of commands in docs/cli.md, generated from the commands."""

from __future__ import annotations

from collections.abc import Iterator

import click

from llmops.cli.main import COMMANDS, SECTIONS, cli


def markdown() -> str:
    """Return a table of commands under each heading of `llmops --help`."""
    group = click.Context(cli, info_name="llmops")
    lines = []
    for heading, names in SECTIONS.items():
        lines += ["", f"## {heading}", "", "| Command | |", "|---|---|"]
        lines += [f"| `{usage}` | {said} |" for name in names for usage, said in _iterate_usages(name, group)]
    return "\n".join(lines) + "\n"


def _iterate_usages(name: str, parent: click.Context) -> Iterator[tuple[str, str]]:
    """Yield usage and summary of a command, or of each of its subcommands."""
    command = cli.get_command(parent, name)
    assert command is not None, name
    context = click.Context(command, info_name=name, parent=parent)
    if not isinstance(command, click.Group):
        yield _usage(context), COMMANDS[name]
        return
    if command.invoke_without_command:
        yield context.command_path, COMMANDS[name]
    for inner, one in command.commands.items():
        yield _usage(click.Context(one, info_name=inner, parent=context)), one.get_short_help_str(limit=200)


def _usage(context: click.Context) -> str:
    arguments = [one.make_metavar(context) for one in context.command.params if isinstance(one, click.Argument)]
    return " ".join([context.command_path, *arguments]).replace("|", r"\|")
