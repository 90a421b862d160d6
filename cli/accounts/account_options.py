"""Options that the commands `key`, `tenant`, `price`, `usage` and `audit` share."""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from llmops.cli.accounts.admin_client import AdminClient
from llmops.cli.accounts.param_types import BUDGET, LIMIT
from llmops.cli.options import add_options
from llmops.errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])


def admin_options(command: Command) -> Command:
    """Add the options `--store`, `--url` and `--json`.

    The options become the parameters `admin` (an AdminClient) and `as_json`.
    """

    @functools.wraps(command)
    def run(*arguments: Any, store: str | None, url: str | None, **options: Any) -> Any:
        source = click.get_current_context().get_parameter_source
        if url and store and source("store") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("--store and --url exclude each other; give one of them.")
        try:
            return command(*arguments, admin=AdminClient(store, url, os.environ.get("LLMOPS_API_KEY")), **options)
        except ValueError as error:
            raise _input_error(error) from error

    return _add_admin_options(run)  # type: ignore[no-any-return]


_add_admin_options = add_options(
    click.option(
        "--store",
        metavar="URL",
        envvar="LLMOPS_STORE",
        help="sqlite:///FILE or postgresql://…; also $LLMOPS_STORE.  [default: store.db in the cache folder]",
    ),
    click.option(
        "--url",
        help="Use the admin API of `llmops control` or `llmops up` at this URL, with the key in $LLMOPS_API_KEY.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)


def _input_error(error: ValueError) -> Exception:
    """Return the first fault of a request body that the admin API's types do not allow."""
    from pydantic import ValidationError

    from llmops.validation_errors import explain_error

    if not isinstance(error, ValidationError):
        return error
    first = error.errors()[0]
    return InputError(f"The value of {'.'.join(map(str, first['loc']))} cannot be used: {explain_error(first)}.")


limit_options = add_options(
    click.option("--rpm", type=LIMIT, help="Requests per minute, or none."),
    click.option("--tpm", type=LIMIT, help="Tokens per minute, or none."),
    click.option("--concurrent", type=LIMIT, help="Concurrent requests, or none."),
    click.option("--budget", type=BUDGET, help="US dollars per day, week or month, e.g. 50/month, or none."),
)
