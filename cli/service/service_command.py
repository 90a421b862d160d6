"""`-f llmops.yaml [--profile NAME]`: commands that take parameters from llmops.yaml. Flags win."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

if TYPE_CHECKING:
    from llmops.cli.service.service_file import LoadedService

Command = Callable[..., None]


@dataclass(frozen=True)
class ServiceSelection:
    """The service file that a command was given, its flags, and the model that this run is about.

    There is no model if the command is about all models.
    """

    described: LoadedService
    arguments: tuple[str, ...]
    model: str = ""
    others: tuple[str, ...] = ()


class ServiceFileCommand(click.Command):
    """A command whose defaults come from llmops.yaml.

    `parameters` returns those of all models together.
    """

    parameters: ClassVar[Callable[[Any], dict[str, Any]]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        chosen = ctx.obj if isinstance(ctx.obj, ServiceSelection) else self._chosen(ctx, args)
        if chosen is not None:
            ctx.obj, ctx.default_map = chosen, self.defaults(chosen)
        return super().parse_args(ctx, args)

    def defaults(self, chosen: ServiceSelection) -> dict[str, Any]:
        return type(self).parameters(chosen.described)

    def choose(self, chosen: ServiceSelection, given: dict[str, Any], ctx: click.Context) -> ServiceSelection:
        return chosen

    def _chosen(self, ctx: click.Context, args: list[str]) -> ServiceSelection | None:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        file = given.get("described")
        if file is None:
            if given.get("profile"):
                raise click.UsageError("--profile chooses within a file; give -f FILE.", ctx)
            return None
        from llmops.cli.service.service_file import read

        return self.choose(ServiceSelection(read(Path(file), given.get("profile")), tuple(args)), given, ctx)


class ForEachModel(ServiceFileCommand):
    """A command that runs once for each model of the file, or for those named by `--model`."""

    parameters_of: ClassVar[Callable[[Any, str], dict[str, Any]]]

    def defaults(self, chosen: ServiceSelection) -> dict[str, Any]:
        return type(self).parameters_of(chosen.described, chosen.model)

    def choose(self, chosen: ServiceSelection, given: dict[str, Any], ctx: click.Context) -> ServiceSelection:
        known, asked = list(chosen.described.service.models), given.get("model") or ()
        names = [asked] if isinstance(asked, str) else list(asked) or known
        for name in names:
            if name not in known:
                where = f"{chosen.described.file} has no model {name!r}"
                raise click.UsageError(f"{where}; choose {' or '.join(known)}.", ctx)
        return replace(chosen, model=names[0], others=tuple(names[1:]))

    def invoke(self, ctx: click.Context) -> Any:
        result = super().invoke(ctx)
        chosen = ctx.obj
        for name in chosen.others if isinstance(chosen, ServiceSelection) else ():
            other = replace(chosen, model=name, others=())
            with self.make_context(ctx.info_name, list(chosen.arguments), parent=ctx.parent, obj=other) as again:
                result = super().invoke(again)
        return result


def for_each_model(parameters: Callable[[LoadedService, str], dict[str, Any]]) -> type[click.Command]:
    """Return the class of a command whose parameters are those of one model."""
    return type("DescribedModel", (ForEachModel,), {"parameters_of": staticmethod(parameters)})


def for_all_models(parameters: Callable[[LoadedService], dict[str, Any]]) -> type[click.Command]:
    return type("DescribedService", (ServiceFileCommand,), {"parameters": staticmethod(parameters)})


def file_options(command: Command) -> Command:
    """Add -f and --profile."""
    file = click.option(
        "-f",
        "--file",
        "described",
        type=click.Path(path_type=Path, dir_okay=False),
        expose_value=False,
        help="Defaults from this llmops.yaml; flags override them.",
    )
    profile = click.option("--profile", expose_value=False, help="With -f: profile of the file.")
    return file(profile(command))


def model_option(command: Command) -> Command:
    """Add --model, for commands without such an option of their own."""
    text = "With -f: only this model of the file; may be repeated."
    return click.option("--model", multiple=True, expose_value=False, help=text)(command)


def current_selection() -> LoadedService | None:
    """Return the service file that the running command was given, or None."""
    chosen = click.get_current_context().obj
    return chosen.described if isinstance(chosen, ServiceSelection) else None
