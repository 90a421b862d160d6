"""Tests of the settings that `llmops up` gives its gateway.

The order is flags, then the environment, then files, then its own defaults.
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from llmops.cli.stack import Stack
from llmops.cli.up import DEMO_TOKENS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def settings(port: int | None = None, config: Path | None = None, max_tokens: int | None = None):
    return Stack(None, port, config, None, None, max_tokens)._settings


def test_the_port_comes_from_the_flag_the_environment_and_the_file_in_this_order(port, tmp_path, monkeypatch):
    config = tmp_path / "gateway.yaml"
    config.write_text(f"port: {port}\n")
    assert settings(config=config).port == port
    monkeypatch.setenv("LLMOPS_PORT", str(port + 1))
    assert settings(config=config).port == port + 1
    assert settings(port=0, config=config).port == 0


def test_the_demo_limits_answers_that_name_no_limit_unless_the_settings_do(port, tmp_path):
    config = tmp_path / "gateway.yaml"
    config.write_text(f"port: {port}\nsampling: {{max_tokens: 77}}\n")
    assert settings(port, max_tokens=DEMO_TOKENS).sampling.max_tokens == 512
    assert settings(port).sampling.max_tokens is None
    assert settings(port, config, DEMO_TOKENS).sampling.max_tokens == 77


def test_make_serve_passes_arguments_on():
    said = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed/embedded", "serve", "ARGS=--port 9100"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "bin/llmops up smollm2 --port 9100\n" in said
