"""Programs that a test puts in the place of real ones."""

import os
from pathlib import Path

import pytest


def write_program(path: Path, text: str) -> Path:
    """Write a program that can be executed, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def install_program(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> Path:
    """Write a program, put its folder first on PATH, and return its path."""
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return write_program(path, text)
