"""tests/mutation.yaml: which modules, their tests, and the faults that change nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "mutation.yaml"


@dataclass(frozen=True)
class Settings:
    """`modules`: file to its test files. `equivalent`: file to the (line, changed line) pairs that change nothing."""

    sample: int
    seed: int
    bar: float
    modules: dict[str, list[str]]
    equivalent: dict[str, set[tuple[str, str]]]


def read_settings(path: Path = FILE) -> Settings:
    """Raises SystemExit where an equivalent fault is listed for a line that is no longer there."""
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    listed = content.pop("equivalent") or {}
    for file, entries in listed.items():
        lines = {line.strip() for line in (ROOT / file).read_text().splitlines()}
        for entry in entries:
            if entry["was"] not in lines:
                raise SystemExit(f"{path.name}: {file} no longer has the line `{entry['was']}`; remove the entry.")
    pairs = {file: {(one["was"], one["now"]) for one in entries} for file, entries in listed.items()}
    return Settings(**content, equivalent=pairs)
