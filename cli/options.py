"""What several commands check of their options."""

from __future__ import annotations

from typing import Any

import click


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
