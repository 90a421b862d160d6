"""Options that `key`, `tenant`, `price` and `usage` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmops.cli.accounts.types import BudgetType, LimitType, changed

if TYPE_CHECKING:
    from llmops.store.accounts.limits import Limits

Command = TypeVar("Command", bound=Callable[..., Any])


def store_options(command: Command) -> Command:
    """`--store` and `--json`, as parameters `store` and `as_json`."""
    command = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)
    return click.option(
        "--store",
        metavar="URL",
        envvar="LLMOPS_STORE",
        help="sqlite:///FILE or postgresql://…; also $LLMOPS_STORE.  [default: store.db in the cache folder]",
    )(command)


def limit_options(command: Command) -> Command:
    """`--rpm`, `--tpm`, `--concurrent`, `--budget`."""
    for option in (
        click.option("--budget", type=BudgetType(), help="US dollars per day, week or month: 50/month; or none."),
        click.option("--concurrent", type=LimitType(), help="Requests at once; or none."),
        click.option("--tpm", type=LimitType(), help="Tokens per minute; or none."),
        click.option("--rpm", type=LimitType(), help="Requests per minute; or none."),
    ):
        command = option(command)
    return command


def changed_limits(was: Limits, given: dict[str, Any]) -> Limits:
    """With what `limit_options` were given."""
    names = ("rpm", "tpm", "concurrent", "budget")
    return replace(was, **{name: changed(given[name], getattr(was, name)) for name in names})
