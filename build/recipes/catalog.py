"""List the recipes that ship with the package, and the models that cannot have a recipe."""

import difflib
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llmops.build.plan.build_plan import BuildPlan
from llmops.errors import InputError

FOLDER = Path(__file__).with_name("data")

#: Popular models that llmops cannot serve on a usual machine -> the reason, for `llmops recipes`.
UNSUPPORTED = {
    "Llama 4 Maverick on 8 x H100": "the weights of 800 GB do not fit in bfloat16, and llmops does not quantise them",
    "Qwen3-Next": "llmops does not know its family yet; TensorRT-LLM 1.3 has it",
    # The sources are NVIDIA/TensorRT-LLM examples/configs/curated/qwen3.5.yaml (655bee400161) and
    # nemotron-3-super-throughput.yaml (7f86dbcf1975).
    "Qwen3.5, Nemotron 3": "NVIDIA's options (Qwen3.5 397B, Nemotron 3 Super) are for 512 sequences per GPU, whose "
    "states do not fit beside the weights on H100; `llmops plan` and `build` know both from TensorRT-LLM 1.3 on",
    "GLM 4.6 on 8 x H100": "the weights of 711 GB do not fit in bfloat16; `llmops plan` knows it",
    "MiniMax M3": "llmops does not know its family yet",
    "Kimi K2 on 8 x H100": "its weights of about 1 TB do not fit; `llmops plan` knows it",
    "DeepSeek R1, V3, V3.2 on 8 x H100": "the weights of 671 GB do not fit; the recipe deepseek-r1 is for 8 x H200",
}


@dataclass(frozen=True)
class Recipe:
    """A model with the settings to serve it on one machine.

    `sources` has the origin of each number of `plan`, by field. `published` is a published
    throughput with its source, for `llmops bench --compare`, or empty. `file` is the argument of
    `llmops build --plan`.
    """

    name: str
    model: str
    summary: str
    machine: str
    sources: dict[str, str]
    plan: BuildPlan
    file: Path
    published: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes, by name."""
    found = (_read_recipe(file) for file in sorted(FOLDER.glob("*.json")))
    return {recipe.name: recipe for recipe in found}


def find_recipe(name: str) -> Recipe:
    """Return the recipe `name`.

    Raises:
        InputError: The recipe is unknown. The message suggests the recipe with the nearest name.
    """
    known = recipes()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}."
    raise InputError(f"The recipe {name} is unknown; {hint}")


def _read_recipe(file: Path) -> Recipe:
    content = json.loads(file.read_text(encoding="utf-8"))
    about = dict(content["recipe"])
    notes = tuple(about.pop("notes", ()))
    return Recipe(**about, notes=notes, plan=BuildPlan.from_dict(content, file.name), file=file)
