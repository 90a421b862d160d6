"""The list of commands of docs/cli.md, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator

import click

from llmops.cli.main import COMMANDS, SECTIONS, cli


def markdown() -> str:
    """Return one section per command: its summary, its usage and the names of its options."""
    group = click.Context(cli, info_name="llmops")
    return "".join(
        f"\n## {heading}\n" + "".join(_section(name, group) for name in commands)
        for heading, commands in SECTIONS.items()
    )


def _section(name: str, group: click.Context) -> str:
    command = cli.get_command(group, name)
    if command is None:
        raise LookupError(name)
    return f"\n### {name}\n\n{COMMANDS[name]}\n\n" + "\n".join(_usages(command, name, group)) + "\n"


def _usages(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """Yield a line of a list for a command, or for each of its own commands."""
    context = click.Context(command, info_name=name, parent=parent)
    if isinstance(command, click.Group):
        for inner, one in command.commands.items():
            yield from _usages(one, inner, context)
        return
    shown = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
    arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
    options = [max(one.opts, key=len).lstrip("-") for one in shown if "--help" not in one.opts]
    yield f"- `{' '.join([context.command_path, *arguments])}`" + (":" + _wrapped(options) if options else "")


def _wrapped(names: list[str]) -> str:
    """Return the names in lines of at most 100 characters, the first one after what precedes it."""
    lines, line = [], ""
    for at, name in enumerate(names):
        word = name + ("" if at == len(names) - 1 else ",")
        if len(line) + len(word) > 96:
            lines.append(line.rstrip())
            line = ""
        line += word + " "
    return "\n  " + "\n  ".join([*lines, line.rstrip()])
