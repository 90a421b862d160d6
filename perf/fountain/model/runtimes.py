"""Takes the place of the engine model's own `runtimes.py`: there is one runtime, the fountain."""

from __future__ import annotations

import json
from typing import Any

from .fountain_runtime import FountainRuntime
from .runtime import EngineRuntime


def create_runtime(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    options = json.loads(parameters["fountain"])
    return FountainRuntime(options["period"], options["first"], options["token_ids"], card["max_batch_size"])
