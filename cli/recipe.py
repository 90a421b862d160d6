"""`llmops recipe`: ready plans for models that many people serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmops.cli.options import FILE_PATH
from llmops.cli.output import print_line

if TYPE_CHECKING:
    from llmops.build.recipes.catalog import Recipe

#: The fields of a build plan that `show` prints, in this order, each with its source.
_SHOWN = ("target", "gpu", "quantisation", "kv_cache_dtype", "tp_size", "pp_size", "ep_size", "replicas",
          "max_batch_size", "max_num_tokens", "max_seq_len", "kv_cache_fraction", "settings")  # fmt: skip


@click.group("recipe")
def command() -> None:
    """List, show and take recipes: plans for well-known models on one machine.

    Each number of a recipe names its source. The file of a recipe is a plan that `llmops build
    --plan` takes.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print names, models and machines as JSON.")
def list_(as_json: bool) -> None:
    """List the recipes, and the models that cannot be served."""
    from llmops.build.recipes.catalog import UNSUPPORTED, recipes

    found = recipes().values()
    if as_json:
        rows = [{"name": one.name, "model": one.model, "machine": one.machine, "summary": one.summary} for one in found]
        click.echo(json.dumps({"recipes": rows, "unsupported": UNSUPPORTED}, indent=2))
        return
    width = max(len(one.name) for one in found)
    for one in found:
        click.echo(f"{one.name:<{width}}  {one.machine:<9}  {one.summary}")
    click.echo("\nNot supported:")
    for model, reason in UNSUPPORTED.items():
        click.echo(f"  {model}: {reason}.")


@command.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the file of the recipe.")
def show(name: str, as_json: bool) -> None:
    """Show the numbers of the recipe NAME with their sources, and how to build it."""
    from llmops.build.recipes.catalog import find_recipe

    recipe = find_recipe(name)
    click.echo(recipe.file.read_text(encoding="utf-8").rstrip() if as_json else _text(recipe))


@command.command("use")
@click.argument("name")
@click.option("-o", "--output", type=FILE_PATH, help="The file to write.  [default: NAME.json]")
def use(name: str, output: Path | None) -> None:
    """Write the recipe NAME to a file, to be changed or built as it is."""
    from llmops.build.recipes.catalog import find_recipe
    from llmops.errors import InputError

    recipe = find_recipe(name)
    file = output or Path(f"{name}.json")
    if file.exists():
        raise InputError(f"{file} exists; name another file with -o, or remove it.")
    try:
        shutil.copyfile(recipe.file, file)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); name a file in a folder that exists.") from None
    print_line(f"Wrote {file}.")
    print_line(f"Next: {_build(recipe, str(file))}")


def _build(recipe: Recipe, file: str) -> str:
    return f"llmops build {recipe.model} -o engines/{recipe.name} --plan {file}"


def _text(recipe: Recipe) -> str:
    plan = recipe.plan.to_dict()
    lines = [f"{recipe.name}: {recipe.summary}", f"Model {recipe.model}, on {recipe.machine}.", ""]
    for field in _SHOWN:
        value = plan[field]
        if value in ({}, None):
            continue
        shown = " ".join(f"{key}={json.dumps(one)}" for key, one in value.items()) if field == "settings" else value
        source = recipe.sources.get(field, "")
        lines.append(f"  {field:<18} {shown}" + (f"\n  {'':<18} source: {source}" if source else ""))
    if recipe.published:
        data = recipe.published
        lines += ["", f"Published: {data['output_tokens_per_second_per_gpu']} output tokens/s per GPU at "
                      f"{data['isl']}/{data['osl']} tokens on {data['measured_on']}.",
                  f"  source: {data['source']}"]  # fmt: skip
        if "note" in data:
            lines.append(f"  {data['note']}")
    lines += ["", *recipe.notes, *([""] if recipe.notes else [])]
    lines.append(f"Build it: llmops recipe use {recipe.name} && {_build(recipe, recipe.name + '.json')}")
    return "\n".join(lines)
