"""Takes the place of the engine model's own `choose.py`: there is one runtime, the mock engine."""

from __future__ import annotations

import json
from typing import Any

from ..runtime import EngineRuntime
from .mock import MockRuntime


def create_runtime(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    options = json.loads(parameters["mock"])
    return MockRuntime(options["period"], options["first"], options["token_ids"], card["max_batch_size"])
