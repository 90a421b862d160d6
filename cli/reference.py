"""The command reference of docs/cli.md, from the commands' own help."""

from __future__ import annotations

import click

from llmops.cli.main import COMMANDS, cli

WIDTH = 110


def markdown() -> str:
    """One section per command: its one-line summary, then `--help` as a user sees it at 110 columns."""
    return "\n".join(_section(name) for name in COMMANDS)


def _section(name: str) -> str:
    group = click.Context(cli, info_name="llmops", terminal_width=WIDTH, max_content_width=WIDTH)
    command = cli.get_command(group, name)
    if command is None:
        raise LookupError(name)
    return f"\n## `llmops {name}`\n\n{COMMANDS[name]}\n{_help(command, name, group)}"


def _help(command: click.Command, name: str, parent: click.Context) -> str:
    """Its help, then that of its own commands."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)
    text = f"\n```\n{command.get_help(context)}\n```\n"
    inner = command.commands.items() if isinstance(command, click.Group) else ()
    return text + "".join(_help(one, inner_name, context) for inner_name, one in inner)
