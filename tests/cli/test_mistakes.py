"""Mistakes of a first day at the command line: one sentence with a way out, and no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmops.connections import http_refusal


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
    error = http_refusal("http://a/v1", 404, "The model 'b' does not exist. GET /v1/models lists the models.")
    assert error.message.startswith("http://a/v1 does not serve that model")
    assert "check the URL" not in error.message


def test_the_url_of_a_checkpoint_gets_its_hub_id(tmp_path):
    result = run("build", "https://huggingface.co/a/b", "-o", str(tmp_path / "engine"))
    assert result.returncode == 2
    assert result.stderr == (
        "Error: https://huggingface.co/a/b is a URL, which is not downloaded; give the hub id, here perhaps a/b.\n"
    )
    assert not list(tmp_path.iterdir())


def test_openvino_reports_nothing():
    code = "import llmops, openvino.tools.ovc as ovc; print(type(ovc.telemetry).__module__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip().endswith("telemetry_stub"), result.stderr


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
