"""Options that `key`, `tenant`, `price`, `usage` and `audit` share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from llmops.cli.accounts.admin_backend import AdminBackend
from llmops.cli.accounts.param_types import BudgetType, LimitType, typed_values

Command = TypeVar("Command", bound=Callable[..., Any])
LIMITS = ("rpm", "tpm", "concurrent", "budget")


def admin_options(command: Command) -> Command:
    """`--store`, `--url` and `--json`, as parameters `at` (an Administration) and `as_json`."""

    @functools.wraps(command)
    def run(*arguments: Any, store: str | None, url: str | None, **given: Any) -> Any:
        source = click.get_current_context().get_parameter_source
        if url and store and source("store") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--store and --url exclude each other; give one of them.")
        return command(*arguments, at=AdminBackend(store, url, os.environ.get("LLMOPS_API_KEY")), **given)

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        click.option(
            "--url",
            help="Use the admin API of `llmops control` or `llmops up` at this URL, with the key in $LLMOPS_API_KEY.",
        ),
        click.option(
            "--store",
            metavar="URL",
            envvar="LLMOPS_STORE",
            help="sqlite:///FILE or postgresql://…; also $LLMOPS_STORE.  [default: store.db in the cache folder]",
        ),
    ):
        run = option(run)
    return run  # type: ignore[return-value]


def limit_options(command: Command) -> Command:
    """`--rpm`, `--tpm`, `--concurrent`, `--budget`."""
    for option in (
        click.option("--budget", type=BudgetType(), help="US dollars per day, week or month, e.g. 50/month, or none."),
        click.option("--concurrent", type=LimitType(), help="Concurrent requests, or none."),
        click.option("--tpm", type=LimitType(), help="Tokens per minute, or none."),
        click.option("--rpm", type=LimitType(), help="Requests per minute, or none."),
    ):
        command = option(command)
    return command


def given_limits(given: dict[str, Any]) -> dict[str, Any]:
    """Of what `limit_options` were given, that which was typed."""
    return typed_values({name: given[name] for name in LIMITS})
