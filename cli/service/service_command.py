"""Commands with `-f llmops.yaml [--profile NAME]`, which read defaults from llmops.yaml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from llmops.cli.options import FILE_PATH
from llmops.cli.service.command_defaults import name_model

if TYPE_CHECKING:
    from llmops.cli.service.service_file import LoadedService

Command = Callable[..., None]


@dataclass(frozen=True)
class ServiceSelection:
    """The service file of a command, the command's flags, and the model of this run.

    The model is empty if the command is about all models. `others` are the models for which the
    command runs afterwards.
    """

    loaded: LoadedService
    arguments: tuple[str, ...]
    model: str = ""
    others: tuple[str, ...] = ()


class ServiceFileCommand(click.Command):
    """A command whose defaults come from llmops.yaml and that flags override.

    `for_each_model` and `for_all_models` create subclasses.
    """

    per_model: ClassVar[bool]
    defaults: ClassVar[Callable[..., dict[str, Any]]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments with the file's values as defaults."""
        selection = ctx.obj if isinstance(ctx.obj, ServiceSelection) else self._select(ctx, args)
        if selection is not None:
            ctx.obj = selection
            model = (selection.model,) if self.per_model else ()
            ctx.default_map = type(self).defaults(selection.loaded, *model)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command for the first model, and then once for each further model."""
        result = self._invoke_once(ctx)
        selection = ctx.obj
        for name in selection.others if isinstance(selection, ServiceSelection) else ():
            other = replace(selection, model=name, others=())
            with self.make_context(ctx.info_name, list(selection.arguments), parent=ctx.parent, obj=other) as again:
                result = self._invoke_once(again)
        return result

    def _invoke_once(self, ctx: click.Context) -> Any:
        """Run the command. An error names the file and the model."""
        if not isinstance(ctx.obj, ServiceSelection) or not ctx.obj.model:
            return super().invoke(ctx)
        with name_model(ctx.obj.loaded, ctx.obj.model):
            return super().invoke(ctx)

    def _select(self, ctx: click.Context, args: list[str]) -> ServiceSelection | None:
        options, _, _ = self.make_parser(ctx).parse_args(list(args))
        file = options.get("described")
        if file is None:
            if options.get("profile"):
                raise click.UsageError("--profile chooses within a file; give -f FILE.", ctx)
            return None
        from llmops.cli.service.service_file import read

        selection = ServiceSelection(read(Path(file), options.get("profile")), tuple(args))
        if not self.per_model:
            return selection
        known, names = list(selection.loaded.service.models), options.get("model") or ()
        names = [names] if isinstance(names, str) else list(names) or known
        for name in names:
            if name not in known:
                where = f"{selection.loaded.file} has no model {name!r}"
                raise click.UsageError(f"{where}; choose {' or '.join(known)}.", ctx)
        return replace(selection, model=names[0], others=tuple(names[1:]))


def for_each_model(defaults: Callable[[LoadedService, str], dict[str, Any]]) -> type[click.Command]:
    """Return the class of a command that runs once for each model of the file or of `--model`.

    Args:
        defaults: Returns the command's parameters for one model.
    """
    return type("ModelCommand", (ServiceFileCommand,), {"defaults": staticmethod(defaults), "per_model": True})


def for_all_models(defaults: Callable[[LoadedService], dict[str, Any]]) -> type[click.Command]:
    """Return the class of a command that runs once for the whole file.

    Args:
        defaults: Returns the command's parameters for the file.
    """
    return type("ServiceCommand", (ServiceFileCommand,), {"defaults": staticmethod(defaults), "per_model": False})


def file_options(command: Command) -> Command:
    """Add -f and --profile."""
    file = click.option(
        "-f",
        "--file",
        "described",
        type=FILE_PATH,
        expose_value=False,
        help="Defaults from this llmops.yaml; flags override them.",
    )
    profile = click.option("--profile", expose_value=False, help="With -f: profile of the file.")
    return file(profile(command))


def model_option(command: Command) -> Command:
    """Add --model, for commands that have no other option with this name."""
    text = "With -f: only this model of the file; may be repeated."
    return click.option("--model", multiple=True, expose_value=False, help=text)(command)


def current_selection() -> LoadedService | None:
    """Return the service file that the running command was given, or None."""
    selection = click.get_current_context().obj
    return selection.loaded if isinstance(selection, ServiceSelection) else None
