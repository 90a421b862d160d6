"""Types and checks of options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmops.durations import seconds
from llmops.output_files import check_writable


class Duration(click.ParamType):
    """A duration with its unit, as seconds: 500ms, 0.5s, 2m, 1h."""

    name = "duration"

    def __init__(self, *, zero: bool = False, whole: bool = False) -> None:
        """`zero` allows 0; `whole` rounds to whole seconds, of which there must be one."""
        self._zero, self._whole = zero, whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = seconds(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        if not found and not self._zero:
            self.fail("it must be above zero.", param, ctx)
        if not self._whole:
            return found
        if found and found < 1:
            self.fail(f"{value} is less than a second.", param, ctx)
        return round(found)


class OutputFile(click.ParamType):
    """A file to write. It is checked before the command begins; `-` is left to the command."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if str(path) != "-":
            check_writable(path)
        return path


def rare_option(*names: str, **more: Any) -> Any:
    """Declare an option that few people set: only `--help-all` shows it."""
    return click.option(*names, hidden=True, **more)


def help_all_option(command: Any) -> Any:
    """Add `--help-all`, which shows the rare options too."""

    def show(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
        if not wanted or ctx.resilient_parsing:
            return
        for parameter in ctx.command.params:
            if isinstance(parameter, click.Option):
                parameter.hidden = False
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()

    return click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options, also those that few people set.",
    )(command)


def gateways_option(help_: str) -> Any:
    """--url, as often as there are gateways: `urls` of the command."""
    return click.option(
        "--url", "urls", multiple=True, default=("http://127.0.0.1:9000",), show_default=True, help=help_
    )


def refuse_others(sentence: str, *names: str) -> None:
    """Raises UsageError, `sentence` and what to leave out, for anything typed beside the parameters `names`: it would
    change nothing."""
    context = click.get_current_context()
    typed = [
        parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name not in names
        and context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if typed:
        raise click.UsageError(f"{sentence}; leave {', '.join(typed)} out.")
