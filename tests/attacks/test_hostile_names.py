"""Names that YAML and shells read as something else: of pools in the chart, and of folders in printed commands."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.engine_folder.manifest_extras import OpenVinoExtra
from llmops.build.trtllm.container_images import bind_mount
from llmops.cli.main import cli
from llmops.errors import InputError
from tests.attacks.test_checkpoints import CONFIG, folder
from tests.deploy.chart_values import KEYS, ONE
from tests.deploy.test_chart import CHART, helm

__all__ = ["folder"]
#: Words of YAML that Kubernetes accepts as names.
WORDS = ["yes", "null", "0x10", "1e3"]


def _odd_values(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield labels and names that are no texts."""
    if isinstance(value, list):
        value = {str(at): one for at, one in enumerate(value)}
    if not isinstance(value, dict):
        return
    for key, one in value.items():
        is_text = path[-1:] in (("labels",), ("matchLabels",)) or key in ("name", "claimName")
        if is_text and not isinstance(one, str):
            yield (*path, key), one
        yield from _odd_values(one, (*path, key))


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_yaml_is_the_name_of_a_pool_and_a_claim(word: str) -> None:
    """Before the fix, labels of a pool `null` were empty, so that its policies and services selected all pools."""
    values = {**KEYS, "storage": {"claim": word}, "engines": {word: ONE}}
    done = helm("template", "release", str(CHART), values=values)
    assert done.returncode == 0, done.stderr
    assert list(_odd_values(list(yaml.safe_load_all(done.stdout)))) == []


def test_a_new_llmops_yaml_shows_the_characters_of_a_path(tmp_path: Path) -> None:
    """Before the fix, the file had U+202E as it is, which turns the line around in an editor."""
    path, checkpoint = tmp_path / "llmops.yaml", "/models/\u202egnp.é\u200b"
    done = CliRunner().invoke(cli, ["init", checkpoint, "-o", str(path), "--name", "m"])
    assert done.exit_code == 0, done.output
    assert 'checkpoint: "/models/\\u202egnp.é\\u200b"\n' in path.read_text()
    assert yaml.safe_load(path.read_text())["models"]["m"]["checkpoint"] == checkpoint


def test_a_printed_command_runs_nothing_of_a_folders_name(folder: Path, tmp_path: Path) -> None:
    """Before the fix, who pasted the docker command of `build --dry-run` ran what the folder's name said."""
    assert CONFIG
    output = str(tmp_path / "$(touch PWNED)`touch PWNED`;&'\"")
    done = CliRunner().invoke(cli, ["build", str(folder), "-o", output, "--target", "tensorrt", "--dry-run"])
    assert done.exit_code == 0, done.output
    (line,) = [one for one in done.output.splitlines() if one.startswith("docker run")]
    assert bind_mount(output, "/engine") in shlex.split(line)


def test_an_engine_names_no_architecture_that_a_terminal_obeys_and_no_batch_that_fills_the_memory() -> None:
    """Before the fix, `llmops repo` printed it as it was; a server of a batch of 2**27 grew by 200 MB a second."""
    engine = json.loads((Path(__file__).parents[1] / "build/data/engines/tensorrt.json").read_text())
    EngineManifest.model_validate(engine)
    with pytest.raises(ValidationError, match="control character"):
        EngineManifest.model_validate({**engine, "architecture": "Llama\x1b]0;owned\x07"})
    with pytest.raises(ValidationError, match="max_batch_size"):
        EngineManifest.model_validate({**engine, "limits": {**engine["limits"], "max_batch_size": 1 << 27}})


@pytest.mark.parametrize("change", [{"properties": {"CACHE_DIR": "/srv"}}, {"device": "AUTO:/tmp/x.so"}], ids=str)
def test_an_engine_chooses_no_folder_into_which_the_server_writes(change: dict[str, object]) -> None:
    """Before the fix, Triton wrote 539 MB into the folder of CACHE_DIR."""
    with pytest.raises(ValidationError):
        OpenVinoExtra.model_validate({"openvino": change})


@pytest.mark.parametrize("command", [["usage", "--tenant"], ["rollout", "status"], ["key", "list", "--user"]], ids=str)
def test_a_name_that_no_request_can_have_gets_a_sentence(command: list[str], tmp_path: Path) -> None:
    """Before the fix, these commands ended with a traceback."""
    done = CliRunner().invoke(cli, [*command, "\x1b[2J", "--store", f"sqlite:///{tmp_path}/store.db"])
    assert isinstance(done.exception, InputError)


def test_diff_prints_no_name_that_a_terminal_obeys(tmp_path: Path) -> None:
    """Before the fix, the name of a model of an llmops.yaml reached the terminal as it was."""
    file = tmp_path / "llmops.yaml"
    file.write_text(json.dumps({"models": {"m\x1b]52;c;x\x07": {"checkpoint": "smollm2"}}}))
    done = CliRunner().invoke(cli, ["diff", "-f", str(file), "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 0, done.output
    assert "\\x1b]52;c;x\\x07" in done.output
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipe", "use", "gpt-oss-20b", "-o"],
        ["init", "smollm2", "-o"],
        ["plan", "smollm2", "--gpu", "h100-sxm", "--save"],
        ["plan", "smollm2", "--gpu", "h100-sxm", "--html"],
        ["build", "smollm2", "--target", "tensorrt", "--dry-run", "-o"],
        ["clean"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_prints_no_path_that_a_terminal_obeys(arguments, tmp_path, monkeypatch) -> None:
    """Before the fix, `-o`, `--save` and the cache folder reached the terminal as they were."""
    odd = tmp_path / "a\x1b]0;owned\x07\u202e\nb"
    odd.mkdir()
    monkeypatch.setenv("LLMOPS_CACHE", str(odd))
    path = [str(odd / "plan.json")] if arguments[0] != "clean" else []
    done = CliRunner().invoke(cli, [*arguments, *path])
    # The docker command of a dry run quotes the line break.
    shown = done.output.replace("\n", "\\n") if "--dry-run" in arguments else done.output
    assert "\\x1b]0;owned\\x07\\u202e\\nb" in shown, (done.output, done.exception)
    assert not {"\x1b", "\x07", "\u202e"} & set(done.output)
