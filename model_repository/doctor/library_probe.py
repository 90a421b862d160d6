"""A script that makes the same calls to TensorRT-LLM as the engine model.

The script runs under the Python that has TensorRT-LLM, which need not have llmops.

`python library_probe.py < task.json` prints a JSON list of [name, error]; an empty error means
success. The task has the folder with the engine model's code, the modules to import, and a profile
to construct for each release line.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

results: list[tuple[str, str]] = []


def attempt(name: str, action: Callable[[], Any]) -> Any:
    """Call `action`, record its error under `name`, and return its result or None."""
    try:
        result = action()
    except BaseException as error:  # noqa: BLE001 - a library may end the process at import, or raise anything
        results.append((name, f"{type(error).__name__}: {error}"))
        return None
    results.append((name, ""))
    return result


def probe_llm_api(task: dict[str, Any]) -> None:
    """Construct the arguments, sampling parameters and quantization of `llmops serve`."""
    library = importlib.import_module("llmops_engine.runtimes.trtllm_library")
    runtime = importlib.import_module("llmops_engine.runtimes.trtllm")
    request = importlib.import_module("llmops_engine.request")
    api = attempt("the names that the engine model uses", lambda: library.load_library())
    if api is None:
        return
    for name, profiles in task["profiles"].items():

        def arguments(profiles: Any = profiles) -> None:
            profile = library.choose_profile(profiles, api.version)
            library.final_arguments(api, profile, "/models/x", "/models/x")

        attempt(f"LlmArgs: {name}", arguments)
    for name, fields in task["requests"].items():

        def sampling(fields: Any = fields) -> None:
            runtime.sampling_params(api, _request(request, fields), 0, task["log_probs"], (2,))

        attempt(f"SamplingParams: {name}", sampling)
    names = importlib.import_module("tensorrt_llm.llmapi")
    attempt("KvCacheConfig", lambda: names.KvCacheConfig(free_gpu_memory_fraction=0.9, dtype="fp8"))
    for algorithm in task["algorithms"]:
        attempt(f"QuantConfig: {algorithm}", partial(_quantised, names, algorithm))


def probe_executor(task: dict[str, Any]) -> None:
    """Construct all objects for a TensorRT engine with `--serving llmops` except the engine."""
    runtime = importlib.import_module("llmops_engine.runtimes.executor")
    request = importlib.import_module("llmops_engine.request")
    api = attempt("the executor's bindings", lambda: importlib.import_module("tensorrt_llm.bindings.executor"))
    if api is None:
        return
    for name, parameters in task["executor"].items():
        attempt(f"ExecutorConfig: {name}", partial(runtime.executor_config, api, parameters, 64))
    for name, fields in task["requests"].items():
        made = partial(runtime.make_request, api, _request(request, fields), 0, model_ends=(2,), vocab_size=32000)
        attempt(f"executor's Request: {name}", made)


def _request(request: Any, fields: dict[str, Any]) -> Any:
    sampled = request.RuntimeSamplingParams(**fields.get("sampling", {}))
    rest = {key: value for key, value in fields.items() if key != "sampling"}
    rest["end_ids"] = frozenset(rest.get("end_ids", ()))
    rest["guide"] = tuple(rest["guide"]) if rest.get("guide") else None
    ids = importlib.import_module("numpy").array([1, 2, 3])
    return request.RuntimeRequest(ids, 8, sampling=sampled, **rest)


def _quantised(names: Any, algorithm: str) -> Any:
    return names.QuantConfig(quant_algo=names.QuantAlgo[algorithm])


def main() -> None:
    """Read the task, make its calls, and print the results."""
    task = json.load(sys.stdin)
    # the library may print during its import, which must not mix with the results
    answer, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, task["code"])
    imported = [attempt(f"import {name}", partial(importlib.import_module, name)) for name in task["modules"]]
    if all(module is not None for module in imported):
        probe_llm_api(task)
        if task["executor"]:
            probe_executor(task)
    json.dump(results, answer)


if __name__ == "__main__":
    main()
