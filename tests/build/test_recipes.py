"""Recipes: each is a plan that `build` takes, fits the machine that it names, and gives a source for every number."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from llmops.build.checkpoint.known_models import known_model
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.kv_sizes import find_kv
from llmops.build.plan.memory.memory_budget import PlannedLimits, plan_memory
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.search.plan_request import find_precision
from llmops.build.recipes.catalog import UNSUPPORTED, recipes
from llmops.cli.main import cli
from llmops.errors import InputError

NAMES = sorted(recipes())
NUMBERS = ("quantisation", "kv_cache_dtype", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len",
           "kv_cache_fraction")  # fmt: skip


def run(*words):
    return CliRunner().invoke(cli, ["recipe", *words])


@pytest.mark.parametrize("name", NAMES)
def test_build_takes_the_file_as_it_is(tmp_path, name):
    recipe = recipes()[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(known_model(recipe.model).config))
    line = ["build", str(tmp_path / "model"), "-o", str(tmp_path / "e"), "--plan", str(recipe.file), "--dry-run"]
    result = CliRunner().invoke(cli, line)
    assert result.exception is None, result.exception
    assert f"tp {recipe.plan.tp_size}, pp 1" in result.output
    assert f'"max_batch_size": {recipe.plan.max_batch_size}' in result.output
    for setting, value in recipe.plan.settings.items():
        assert f'"{setting.rpartition(".")[2]}": {json.dumps(value)}' in result.output


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_the_machine_that_it_names(name):
    plan, machine = recipes()[name].plan, recipes()[name].machine
    count, _, kind = machine.partition(" x ")
    assert plan.world_size * plan.replicas == int(count)
    assert plan.gpu.startswith(kind.lower())
    model = look_up_model(plan.model).checkpoint.architecture
    plan.check(model)
    precision = find_precision("bf16" if plan.quantisation == "none" else plan.quantisation, model)
    limits = PlannedLimits(plan.max_batch_size, plan.max_num_tokens, plan.max_seq_len, plan.kv_cache_fraction)
    kv = find_kv(plan.kv_cache_dtype, precision)
    memory = plan_memory(
        model, precision, kv, ParallelLayout(plan.tp_size, 1, plan.ep_size), find_gpu(plan.gpu), limits
    )
    assert memory.fits
    assert memory.kv_cache > 0.1 * memory.total


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name):
    recipe = recipes()[name]
    wanted = {*NUMBERS}
    wanted |= {"settings"} if recipe.plan.settings else set()
    wanted |= {"ep_size"} if recipe.plan.ep_size > 1 else set()
    assert wanted <= set(recipe.sources)
    assert all(recipe.sources.values())
    assert name == recipe.file.stem
    shown = run("show", name).output
    assert all(source in shown for source in recipe.sources.values())


def test_the_list_names_what_cannot_be_had():
    output = run("list").output
    assert all(name in output for name in NAMES)
    assert all(f"{model}: {reason}." in output for model, reason in UNSUPPORTED.items())
    assert {row["name"] for row in json.loads(run("list", "--json").output)["recipes"]} == set(NAMES)


def test_use_writes_the_file_once(tmp_path):
    file = tmp_path / "plan.json"
    result = run("use", "llama-3.3-70b", "-o", str(file))
    assert f"--plan {file}" in result.output
    assert file.read_bytes() == recipes()["llama-3.3-70b"].file.read_bytes()
    again = run("use", "llama-3.3-70b", "-o", str(file)).exception
    assert isinstance(again, InputError)
    assert "exists; name another file with -o" in again.message


def test_a_misspelt_name_gets_the_nearest():
    assert "did you mean llama-3.3-70b?" in run("show", "lama-3.3-70b").exception.message


def test_the_command_line_wins_over_the_settings_of_a_recipe(tmp_path):
    recipe = recipes()["gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(known_model(recipe.model).config))
    line = ["build", str(tmp_path), "-o", str(tmp_path / "e"), "--plan", str(recipe.file), "--dry-run"]
    result = CliRunner().invoke(cli, [*line, "--set", "llm.moe_config.backend=CUTLASS"])
    assert '"backend": "CUTLASS"' in result.output
