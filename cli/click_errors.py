"""Click's error messages in the form of llmops: what happened, why, and what to do."""

import difflib
import re
import sys
from collections.abc import Sequence

import click
from click.exceptions import BadParameter, MissingParameter, NoSuchOption, UsageError

# pattern of click's message → llmops' message, in which `{}` stands for the pattern's groups
_SENTENCES = (
    (r"Option '([^']+)' requires (?:an argument|\d+ arguments)\.", "{0} needs a value"),
    (r"Option '([^']+)' does not take a value\.", "{0} takes no value; leave it out"),
    (r"Got unexpected extra arguments? \((.+)\)", "{0} is not expected here"),
    (r"\w+ '(.+)' does not exist\.", "{0} does not exist; name an existing path"),
    (r"\w+ '(.+)' is a file\.", "{0} is a file; name a folder"),
    (r"\w+ '(.+)' is a directory\.", "{0} is a folder; name a file"),
    (
        r"\w+ '(.+)' is not (readable|writable)\.",
        "{0} is not {1} for this user; change its mode, or name another file",
    ),
    (r"No such command '(.+)'\.", "There is no command {0}"),
    (r"'(.+)' is not a valid boolean\..*", "{0} is neither true nor false; write true or false"),
)


def error_message(error: click.ClickException) -> str:
    """Return llmops' message for an error that click or a parameter type has raised."""
    if isinstance(error, MissingParameter):
        return _missing(error)
    if isinstance(error, NoSuchOption):
        near = _or(_similar_options(error))
        return _with_advice(
            f"There is no option {error.option_name}" + (f"; did you mean {near}?" if near else ""), error
        )
    if isinstance(error, BadParameter):
        return f"{_name(error)} is not usable: {_with_advice(_value(error), error)}"
    return _with_advice(_reworded(error.message), error)


def _similar_options(error: NoSuchOption) -> list[str]:
    """Return the options whose names resemble the unknown option, compared without dashes."""
    options = error.ctx.command.params if error.ctx else []
    names = {name.lstrip("-"): name for one in options for name in one.opts if name.startswith("--")}
    return [names[name] for name in difflib.get_close_matches(error.option_name.lstrip("-"), names)]


def _missing(error: MissingParameter) -> str:
    usage = error.ctx.get_usage().removeprefix("Usage: ").strip() if error.ctx else "llmops --help"
    usage = re.sub(r"\s+", " ", usage)
    if isinstance(error.param, click.Option) and error.ctx:
        return f"{_name(error)} is missing; write {_name(error)} {error.param.make_metavar(error.ctx)}."
    return _with_advice(f"{_name(error)} is missing; write `{usage}`", error)


def _value(error: BadParameter) -> str:
    """Return the reason why a value is invalid, and a hint at valid values."""
    kind = error.param.type if error.param is not None else None
    if isinstance(kind, click.Choice):
        given = re.match(r"'(.*)' is not one of", error.message)
        return f"{given[1] if given else error.message} is none of its values; choose {_or(kind.choices)}"
    if isinstance(kind, click.IntRange | click.FloatRange):
        given = re.match(r"(.+) is not (?:in the range|a valid)", error.message)
        return f"{given[1] if given else error.message} does not fit; give {_range(kind)}"
    if kind in (click.INT, click.FLOAT):
        given = re.match(r"(.+) is not a valid", error.message)
        number = "a whole number" if kind is click.INT else "a number"
        return f"{given[1] if given else error.message} does not fit; give {number}"
    return _reworded(error.message)


def _range(kind: click.IntRange | click.FloatRange) -> str:
    number = "a whole number" if isinstance(kind, click.IntRange) else "a number"
    low = None if kind.min is None else f"{'above' if kind.min_open else 'of at least'} {kind.min:g}"
    high = None if kind.max is None else f"{'below' if kind.max_open else 'of at most'} {kind.max:g}"
    return " ".join([number, *(" and ".join(filter(None, (low, high))),)])


def _reworded(message: str) -> str:
    for pattern, sentence in _SENTENCES:
        found = re.fullmatch(pattern, message)
        if found:
            return sentence.format(*found.groups())
    return message


def _name(error: BadParameter) -> str:
    if isinstance(error.param, click.Option):
        return max(error.param.opts, key=len)
    if error.param is not None:
        return error.param.make_metavar(error.ctx) if error.ctx else str(error.param.name)
    return str(error.param_hint or "The value")


def _with_advice(message: str, error: click.ClickException) -> str:
    """Return a message that ends with advice.

    A message without advice is followed by the command whose help has it.
    """
    message = message.rstrip(".")
    if message.endswith("?"):
        return message
    if ";" in message or "`" in message:
        return f"{message}."
    return f"{message}; see `{_command(error)} --help`."


def _command(error: click.ClickException) -> str:
    if isinstance(error, UsageError) and error.ctx:
        return error.ctx.command_path
    # errors of click's parser have no context, and so no command
    return " ".join(["llmops", *(word for word in sys.argv[1:2] if not word.startswith("-"))])


def _or(names: Sequence[object]) -> str:
    words = [str(name) for name in names]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
