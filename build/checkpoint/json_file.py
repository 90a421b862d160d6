"""JSON files of a checkpoint: whatever is wrong with one becomes a CheckpointError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmops.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds. Raises CheckpointError when it cannot be read or holds something else."""
    content = read_value(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; download it again.")
    return content


def read_value(path: Path) -> Any:
    """The JSON value that the file holds. Raises CheckpointError when it cannot be read."""
    try:
        return parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from error


def parse_json(raw: bytes) -> Any:
    """As json.loads, but ValueError is all that it raises."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
