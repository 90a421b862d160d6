"""Which runtime a model's parameters ask for: the module here of that name, imported only when it is asked for."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import llmops_contract as contract

from ..engine_runtime import EngineRuntime

# targets whose module is called after the library's API
_MODULES = {"pytorch": "trtllm", "tensorrt": "executor"}


def create_runtime(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    """`parameters`: the string parameters of config.pbtxt, which the module's `create` takes. Raises ValueError for a
    runtime that this version lacks."""
    name = parameters[contract.RUNTIME_PARAMETER]
    module = f"{__package__}.{_MODULES.get(name, name)}"
    create = getattr(importlib.import_module(module), "create", None) if find_spec(module) else None
    if create is None:
        raise ValueError(
            f"{contract.RUNTIME_PARAMETER}: {name} is not known; make the repository again with this version of llmops"
        )
    made: EngineRuntime = create(parameters, card)
    return made
