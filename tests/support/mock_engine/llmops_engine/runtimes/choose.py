"""Takes the place of the engine model's own `choose.py`: there is one runtime, the mock engine, of two kinds."""

import json
from pathlib import Path
from typing import Any

from ..engine_runtime import EngineRuntime
from .faults import FaultFile
from .mock import MockRuntime
from .paged import PagedMockRuntime, PagedOptions
from .replay import Replay
from .script import Cycle, Mixed, Script
from .step_times import StepTable


def create_runtime(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    options = json.loads(parameters["mock"])
    faults, most = FaultFile(options["faults"]), card["max_batch_size"]
    if options["paged"] is None:
        return MockRuntime(options["period"], options["first"], _script(options), most, faults)
    paged = {**options["paged"], "steps": StepTable(**options["paged"]["steps"]), "factor": options["factor"]}
    paged["name"] = options["name"]
    return PagedMockRuntime(PagedOptions(max_batch_size=most, **paged), Mixed(options["token_ids"]), faults)


def _script(options: dict[str, Any]) -> Script:
    replay = options["replay"]
    if replay is None:
        return Cycle(options["token_ids"])
    return Replay(Path(replay["folder"]), Path(replay["tokenizer"]), replay["end"])
