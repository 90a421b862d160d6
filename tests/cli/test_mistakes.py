"""Mistakes of a first day at the command line: one sentence with a way out, and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmops.connection_errors import http_status_error


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "llmops.cli", *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_a_path_that_is_too_long(command):
    result = run(command, "a" * 5000)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert result.stderr.startswith("Error: aaa")
    assert "cannot be used (File name too long); give another path." in result.stderr


def test_clean_without_a_terminal_says_that_it_removed_nothing(tmp_path):
    engine = tmp_path / "up" / "engine"
    engine.mkdir(parents=True)
    (engine / "weights").write_bytes(b"x" * 5000)
    result = run("clean", "engines", stdin=subprocess.DEVNULL, env={"LLMOPS_CACHE": str(tmp_path)})
    assert result.returncode == 2
    assert result.stderr.endswith("Error: Nothing more was removed: standard input holds no answer; give --yes.\n")
    assert (engine / "weights").exists()


def test_init_of_a_name_that_is_meant_for_the_file(tmp_path):
    result = run("init", "service.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "Error: service.yaml names the file to write, not a checkpoint; write -o service.yaml.\n"
    assert not list(tmp_path.iterdir())


def test_a_wrong_setting_in_the_environment_says_where_it_is(tmp_path):
    result = run("gateway", env={"LLMOPS_PORT": "abc", "LLMOPS_CACHE": str(tmp_path)})
    assert result.returncode == 2
    assert result.stderr == (
        "Error: The setting `port` (flags or environment) is not usable: it must be a whole number.\n"
    )


def test_a_model_that_is_not_served_is_no_wrong_url():
    error = http_status_error("http://a/v1", 404, "The model 'b' does not exist. GET /v1/models lists the models.")
    assert error.message.startswith("http://a/v1 does not serve that model")
    assert "check the URL" not in error.message


def test_the_url_of_a_checkpoint_gets_its_hub_id(tmp_path):
    result = run("build", "https://huggingface.co/a/b", "-o", str(tmp_path / "engine"))
    assert result.returncode == 2
    assert result.stderr == (
        "Error: https://huggingface.co/a/b is a URL, which is not downloaded; give the hub id, here perhaps a/b.\n"
    )
    assert not list(tmp_path.iterdir())


def test_up_of_a_misspelt_model_leaves_no_folder(tmp_path):
    result = run("up", "smolm2", env={"LLMOPS_CACHE": str(tmp_path)}, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith("; did you mean the bundled model smollm2?\n")
    assert not list(tmp_path.glob("up/*"))


def test_openvino_reports_nothing():
    code = "import llmops, openvino.tools.ovc as ovc; print(type(ovc.telemetry).__module__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().endswith("telemetry_stub"), result.stderr


CLICK = {
    "bench --concurrency 0": "--concurrency is not usable: 0 does not fit; give a whole number of at least 1.",
    "bench --rate fast": "--rate is not usable: 'fast' does not fit; give a number above 0.",
    "bench --rate": "--rate needs a value; see `llmops bench --help`.",
    "bench --sweep=3": "--sweep takes no value; leave it out.",
    "bench --timeout 5": "--timeout is not usable: 5 has no unit; write 5ms or 5s.",
    "plan x --prefix-hit 1": "--prefix-hit is not usable: 1.0 does not fit; give a number of at least 0 and below 1.",
    "plan": "CHECKPOINT is missing; write `llmops plan [OPTIONS] CHECKPOINT`.",
    "plan a b": "b is not expected here; see `llmops plan --help`.",
    "plan a --gpuz 8": "There is no option --gpuz; did you mean --gpu or --gpus?",
    "doctor --fix": "There is no option --fix; see `llmops doctor --help`.",
    "repo x": "--output is missing; write --output PATH.",
    "build x --target cpu": "--target is not usable: cpu is none of its values; choose openvino, tensorrt or pytorch.",
    "verify --engine none": "--engine is not usable: none does not exist; name one that does.",
    "verify --engine file": "--engine is not usable: file is a file; name a folder.",
    "simulate --plan . --rate 1": "--plan is not usable: . is a folder; name a file.",
    "key lst": "There is no command lst; see `llmops key --help`.",
    "key update key-1": "Nothing to change; give an option, e.g. --rpm 120.",
    "srve": "There is no command `srve`; did you mean `llmops serve`?",
}


@pytest.mark.parametrize("typed", CLICK)
def test_clicks_own_errors_are_one_sentence_of_ours(tmp_path, typed):
    (tmp_path / "file").touch()
    result = run(*typed.split(), cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"Error: {CLICK[typed]}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("build", "--resume", "nothere"),
            "Error: nothere is not an engine folder (no engine.json). Make one with `llmops build`.\n",
        ),
        (
            ("bench", "--extra", "{a"),
            "Error: --extra {a is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1)); write a JSON object in single quotes, such as --extra '{\"top_k\": 20}'.\n",
        ),
    ],
)
def test_a_wrong_argument_says_what_to_write(tmp_path, arguments, said):
    result = run(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, said)
    assert not list(tmp_path.iterdir())
