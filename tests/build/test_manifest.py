"""engine.json: what earlier builds wrote is read and written again unchanged, and what no build wrote is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.build.engine_folder.manifest_extras import (
    EncoderExtra,
    ManifestExtra,
    OpenVinoExtra,
    PytorchExtra,
    TensorrtExtra,
)
from llmops.build.job.upgrade import plan_upgrade
from llmops.errors import InputError

# written by builds before `extra` had a model per target (golden answers and most source files left out)
WRITTEN = Path(__file__).parent / "data" / "engines"
KINDS = {"openvino": OpenVinoExtra, "encoder": EncoderExtra, "tensorrt": TensorrtExtra, "pytorch": PytorchExtra}


def written(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((WRITTEN / f"{name}.json").read_text())
    return content


def load(folder: Path, content: dict[str, Any]) -> EngineManifest:
    (folder / FILE_NAME).write_text(json.dumps(content))
    return EngineManifest.load(folder)


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_earlier_engines_are_read_and_saved_as_they_were(tmp_path: Path, name: str, kind: type[ManifestExtra]) -> None:
    manifest = load(tmp_path, written(name))
    assert type(manifest.extra) is kind
    manifest.save(tmp_path)
    assert json.loads((tmp_path / FILE_NAME).read_text()) == written(name)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("pytorch", {"llm_args": None}, "llm_args: it must be a mapping of names to values"),
        ("tensorrt", {"guided": "perhaps"}, "guided: it must be true or false"),
        ("tensorrt", {"engines": 2}, "engines: it is unknown"),
        ("openvino", {"llm_args": {}}, "llm_args: it is unknown"),
        ("encoder", {"embedding": {}}, r"embedding\.dimensions: it is required"),
    ],
)
def test_what_is_not_of_the_target_is_refused_in_one_sentence(tmp_path, name, change, says):
    content = written(name)
    content["extra"] |= change
    with pytest.raises(InputError, match=rf"engine\.json cannot be read \(extra: {says}\).*Build the engine again\.$"):
        load(tmp_path, content)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tokenizer", "directory"), "/etc"),
        (("tokenizer", "directory"), "a/../../other"),
        (("model_dir",), ".."),
        (("parallelism", "tp_size"), 10**9),
        (("parallelism", "pp_size"), 0),
        (("limits", "max_batch_size"), -1),
        (("limits", "max_num_tokens"), 10**18),
        (("tokenizer", "vocab_size"), 2**40),
        (("tokenizer", "end_ids"), [0] * 100_000),
        (("quality",), {"perplexity": "low"}),
        (("files",), [""] * (2**15 + 1)),
        (("contents",), {f"{at}": 0 for at in range(2**15 + 1)}),
    ],
)
def test_a_tampered_manifest_leads_nowhere_and_asks_for_no_machine(tmp_path, place, value):
    content = inner = written("openvino")
    for name in place[:-1]:
        inner = inner.setdefault(name, {})
    inner[place[-1]] = value
    with pytest.raises(InputError, match=place[-1]):
        load(tmp_path, content)


def test_a_manifest_that_is_larger_than_any_build_writes_is_not_parsed(tmp_path: Path) -> None:
    """Before the fix, one of 12 MB took 375 MB."""
    with pytest.raises(InputError, match="more than 4 MiB"):
        load(tmp_path, written("openvino") | {"versions": {"a": "a" * (4 << 20)}})


@pytest.mark.parametrize(
    "place", ["name", "source.checkpoint", "quantisation.weights", "versions", "extra.image", "plan"]
)
def test_a_text_that_a_terminal_obeys_is_refused(tmp_path: Path, place: str) -> None:
    """Before the fix, commands printed lines that the engine's maker wrote."""
    content = written("tensorrt")
    *above, last = place.split(".")
    value = {"a": "x\nBuilt."} if last in ("versions", "plan") else "x\x1b[2J\nBuilt."
    (content[above[0]] if above else content)[last] = value
    with pytest.raises(InputError, match="control character") as refused:
        load(tmp_path, content)
    assert "\n" not in refused.value.message


def test_a_command_to_copy_quotes_the_name_of_the_checkpoint(tmp_path: Path) -> None:
    """Before the fix, the shell obeyed what the engine's maker wrote there."""
    content = written("tensorrt")
    content["source"]["checkpoint"] = "x; touch y"
    load(tmp_path, content)
    with pytest.raises(InputError, match="llmops build 'x; touch y' -o "):
        plan_upgrade(tmp_path, "1.3")
