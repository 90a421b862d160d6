"""Read files of LLM-API options, in the format of `trtllm-serve --extra_llm_api_options`.

An option that has a flag of the build (layout, limits, dtype of the KV cache) becomes this flag, so
that the engine's manifest, memory and model metadata agree. Other options become `--set
llm.KEY=VALUE`, and are checked against the fields of the release.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmops.build.target_facts import TARGETS
from llmops.errors import InputError
from llmops.yaml_files import read_yaml

FLAG = "--extra-llm-api-options"
#: LLM-API fields that a flag of the build sets -> the field of BuildSpec.
DECIDED = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "moe_expert_parallel_size": "ep",
    "max_batch_size": "max_batch_size",
    "max_seq_len": "max_seq_len",
    "max_num_tokens": "max_num_tokens",
    "kv_cache_config.dtype": "kv_cache",
}


def read_extra_options(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the BuildSpec fields in a file, and the settings by their `--set` names.

    Raises:
        InputError: The file cannot be read, or holds no mapping.
    """
    content = read_yaml(file, "name a YAML file")
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise InputError(f"{FLAG} {file} holds no options; write one `name: value` per line, as for trtllm-serve.")
    fields, settings = {}, {}
    for path, value in flat_options(content):
        if path in DECIDED:
            fields[DECIDED[path]] = value
        else:
            settings[f"llm.{path}"] = value
    return fields, settings


def flat_options(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the values of nested groups with their dotted names, which begin with `prefix`.

    Groups are mappings whose names end in `_config`. `speculative_config` and empty groups are
    returned as they are.
    """
    found: list[tuple[str, Any]] = []
    for name, value in content.items():
        if isinstance(value, Mapping) and value and name.endswith("_config") and name != "speculative_config":
            found += flat_options(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def contradiction(spec: Any, path: str, value: Any) -> str | None:
    """Return the error message for `--set llm.PATH=VALUE`, or None if the option is allowed.

    The option is not allowed if a flag of the build sets the field, or a field of an emptied group,
    to another value.
    """
    emptied = value is None or value == {}
    name = next((DECIDED[one] for one in DECIDED if one == path or (emptied and one.startswith(f"{path}."))), None)
    if name is None or (value is not None and value == getattr(spec, name)):
        return None
    flag = "--" + name.replace("_", "-")
    known = TARGETS["pytorch"].kv_caches
    instead = f"give {flag} {value} instead"
    if emptied:
        value, instead = json.dumps(value), "leave it out"
    elif name == "kv_cache" and value not in known:
        instead = f"give {flag} {' or '.join(known)}"
    return f"--set llm.{path}={value} contradicts {flag}, which sets this field; {instead}."
