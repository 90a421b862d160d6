"""Read files of LLM-API options, as `trtllm-serve --extra_llm_api_options` takes them.

Options with a flag of the build (layout, limits, the KV cache's dtype) become that flag, so that
the engine's manifest, memory and model metadata agree. Everything else becomes `--set
llm.KEY=VALUE` and is checked against the fields of the release.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmops.errors import InputError
from llmops.yaml_files import read_yaml

FLAG = "--extra-llm-api-options"
#: LLM-API field -> the field of BuildSpec that decides it.
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
    """Return the BuildSpec fields and the settings, by their `--set` names, in a file.

    Raises:
        InputError: The file cannot be read, or is no mapping.
    """
    content = read_yaml(file, "name a YAML file")
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise InputError(f"{FLAG} {file} holds no options; write one `name: value` per line, as for trtllm-serve.")
    fields, settings = {}, {}
    for path, value in _flat(content, ""):
        if path in DECIDED:
            fields[DECIDED[path]] = value
        else:
            settings[f"llm.{path}"] = value
    return fields, settings


def _flat(content: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Return nested groups as dotted names.

    A group without an own name (`speculative_config: {}`) stays whole.
    """
    found: list[tuple[str, Any]] = []
    for name, value in content.items():
        if isinstance(value, Mapping) and value and name.endswith("_config") and name != "speculative_config":
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def contradiction(spec: Any, path: str, value: Any) -> str | None:
    """Return what is wrong with `--set llm.PATH=VALUE`, or None.

    The option is wrong if a flag of the build decides the field.
    """
    name = DECIDED.get(path)
    if name is None or value == getattr(spec, name):
        return None
    flag = "--" + name.replace("_", "-")
    return f"--set llm.{path}={value}: {flag} decides that; give {flag} {value} instead."
