"""Parameter types and checks that several commands share."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from llmops.objectives import parse_share
from llmops.output_files import check_writable
from llmops.units import parse_duration

Command = TypeVar("Command", bound=click.Command)

#: Parameter types for paths.
ANY_PATH = click.Path(path_type=Path)
FILE_PATH = click.Path(path_type=Path, dir_okay=False)
EXISTING_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
EXISTING_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)


class Duration(click.ParamType):
    """A duration with its unit, such as 500ms, 0.5s, 2m or 1h, converted to seconds."""

    name = "duration"

    def __init__(self, *, zero: bool = False, whole: bool = False) -> None:
        """Create the parameter type.

        Args:
            zero: True if 0 is allowed.
            whole: True to round to whole seconds, at least one.
        """
        self._zero, self._whole = zero, whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = parse_duration(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        if not found and not self._zero:
            self.fail("it must be above zero.", param, ctx)
        if not self._whole:
            return found
        if found and found < 1:
            self.fail(f"{value} is less than a second; write 1s or more.", param, ctx)
        return round(found)


class Share(click.ParamType):
    """A share between 0 and 1, written as 99.9% or 0.999."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_share(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class OutputFile(click.ParamType):
    """A file to write, checked before the command begins. The command handles `-` itself."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if str(path) != "-":
            check_writable(path)
        return path


def option_groups(groups: Mapping[str, Sequence[str]]) -> Callable[[Command], Command]:
    """Show the options of a command's help under headings.

    Args:
        groups: Names of parameters, by heading. All other parameters are shown last, under `Other`.
    """

    def apply(command: Command) -> Command:
        def format_options(ctx: click.Context, formatter: click.HelpFormatter) -> None:
            options = [one for one in command.get_params(ctx) if isinstance(one, click.Option)]
            rows = {str(one.name): one.get_help_record(ctx) for one in options}
            named = {name for names in groups.values() for name in names}
            for heading, names in {**groups, "Other": [name for name in rows if name not in named]}.items():
                shown = [row for row in map(rows.__getitem__, names) if row is not None]
                if shown:
                    with formatter.section(heading):
                        formatter.write_dl(shown, col_max=26)

        command.format_options = format_options  # type: ignore[method-assign]
        return command

    return apply


def gateways_option(help_: str) -> Any:
    """Add --url, which may be repeated, as the parameter `urls`."""
    return click.option("--url", "urls", multiple=True, default=("http://127.0.0.1:9000",), help=help_)


def reject_other_options(sentence: str, *names: str) -> None:
    """Raise UsageError if any parameter except `names` was given; see `reject_options`."""
    parameters = click.get_current_context().command.params
    reject_options(sentence, *(str(one.name) for one in parameters if one.name not in names))


def reject_options(sentence: str, *names: str) -> None:
    """Raise UsageError if any of these parameters was given, because they would have no effect.

    Args:
        sentence: The beginning of the error message, which says why.
        names: The names of the parameters.
    """
    context = click.get_current_context()
    typed = [
        parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if typed:
        raise click.UsageError(f"{sentence}; leave {', '.join(typed)} out.")


#: The option --serving, for commands that make a repository.
serving_option = click.option(
    "--serving",
    type=click.Choice(["llmops", "nvidia"]),
    help="Server of TensorRT engines: llmops' own model, or NVIDIA's C++ backend.  [default: nvidia]",
)


def add_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds options and arguments to a command, in this order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


#: The options of commands about a whole service in an llmops.yaml.
described_options = add_options(
    click.option("-f", "--file", type=FILE_PATH, default="llmops.yaml", help="The description of the service."),
    click.option("--profile", help="Name of the profile of the file to use."),
)
#: The options of commands that train a head on the vectors of labelled texts.
training_options = add_options(
    click.argument("examples", metavar="FILE", type=EXISTING_FILE),
    click.option("--url", metavar="URL", required=True, help="A gateway that serves the embedding model."),
    click.option("--model", metavar="NAME", required=True, help="The embedding model, such as minilm."),
    click.option(
        "-o", "--output", metavar="FILE", type=OutputFile(), required=True, help="The file to write the head to."
    ),
)
