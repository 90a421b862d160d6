"""The choice of the runtime that a model's parameters name."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import llmops_contract as contract

from ..engine_runtime import EngineRuntime

# Runtimes whose module has another name than the runtime.
_MODULES = {"pytorch": "trtllm", "tensorrt": "executor"}


def create_runtime(parameters: dict[str, str], metadata: dict[str, Any]) -> EngineRuntime:
    """Return the runtime that the parameters name.

    Args:
        parameters: The parameters of config.pbtxt, all strings.
        metadata: The model metadata, parsed from its JSON file.

    Raises:
        ValueError: This version has no such runtime.
    """
    name = parameters[contract.RUNTIME_PARAMETER]
    module = f"{__package__}.{_MODULES.get(name, name)}"
    create = getattr(importlib.import_module(module), "create", None) if find_spec(module) else None
    if create is None:
        raise ValueError(
            f"{contract.RUNTIME_PARAMETER}: {name} is not known; make the repository again with this version of llmops"
        )
    runtime: EngineRuntime = create(parameters, metadata)
    return runtime
