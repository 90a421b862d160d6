"""Which runtime a model's parameters ask for. Libraries are imported only when theirs is asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import llmops_contract as contract

from ..runtime import EngineRuntime


def create_runtime(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    """`parameters`: the string parameters of config.pbtxt. Raises ValueError for a runtime that this version lacks."""
    name = parameters[contract.RUNTIME]
    if name == "openvino":
        return _openvino(parameters, card)
    if name in ("pytorch", "tensorrt"):
        return _trtllm(name, parameters, card)
    raise ValueError(f"{contract.RUNTIME}: {name} is not known; make the repository again with this version of llmops")


def _openvino(parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    from ..guided.probe import GrammarLimits
    from .openvino import OpenVINOOptions, OpenVINORuntime

    own = json.loads(parameters["openvino"])
    cache = parameters.get("max_tokens_in_paged_kv_cache")
    return OpenVINORuntime(
        OpenVINOOptions(
            model_path=Path(parameters["gpt_model_path"]),
            max_batch_size=card["max_batch_size"],
            max_seq_len=card["max_seq_len"],
            vocab_size=card["vocab_size"],
            max_num_tokens=int(parameters["max_num_tokens"]),
            cache_tokens=int(cache) if cache else None,
            device=own.get("device", "CPU"),
            properties=own.get("properties", {}),
            kv_cache=own["kv_cache"],
            grammars=GrammarLimits(**own.get("grammars", {})),
        )
    )


def _trtllm(name: str, parameters: dict[str, str], card: dict[str, Any]) -> EngineRuntime:
    from .remote import PYTHON_VARIABLE, RemoteRuntime
    from .trtllm import TrtllmOptions, TrtllmRuntime

    options = TrtllmOptions(
        model=parameters["gpt_model_path"],
        tokenizer=card["tokenizer_dir"],
        profiles=json.loads(parameters["llm_profiles"]),
        engine=name == "tensorrt",
        max_batch_size=card["max_batch_size"],
        end_ids=tuple(card["end_ids"]),
        capabilities=card["capabilities"],
        adapters=tuple(json.loads(parameters.get("lora_adapters", "[]"))),
    )
    python = os.environ.get(PYTHON_VARIABLE)
    return RemoteRuntime(python, options) if python else TrtllmRuntime(options)
