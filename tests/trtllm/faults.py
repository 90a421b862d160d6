"""The faults of the second reading that are this project's own, each as a change that a test must
notice.

A row is a file, a text in it that stands for the mend, what stood there before, and the tests that
must fail with it. `LLMOPS_FAULTS=1 pytest tests/trtllm/test_faults.py` puts each into a copy of the
project; without it the texts are held to be there, so that no row goes stale.
"""

from __future__ import annotations

from typing import NamedTuple

_ENGINE = "model_repository/tensorrt_llm/1/llmops_engine/runtimes/trtllm.py"
_LIBRARY = "model_repository/tensorrt_llm/1/llmops_engine/runtimes/trtllm_library.py"
_RUNTIME = "tests/trtllm/test_llm_api_runtime.py"
_MATRIX = "tests/trtllm/test_loader_matrix.py"
_DEAD = "tests/verify/test_dead_engines.py"
_DOCKERFILE = "tests/trtllm/test_dockerfile.py"


class Fault(NamedTuple):
    """One fault. `number` is its row in the second reading, `tests` what pytest is given."""

    number: int
    file: str
    mended: str
    before: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(1, "Dockerfile.trtllm", "LLMOPS_PYTHON=/opt/venv-tritonserver/bin/python", "LLMOPS_PYTHON=/usr/bin/python3",
          (_DOCKERFILE, "-k", "every_path or instructions_run")),
    Fault(2, "Dockerfile.trtllm", "install --no-cache-dir openai==1.109.1", "install --no-cache-dir openai==1.107.3",
          (_DOCKERFILE, "-k", "every_path")),
    Fault(3, "build/targets/nvidia/trtllm_build.py", '["--env", "HOME=/tmp", "--env", "USER=llmops"]', "[]",
          ("tests/trtllm/test_engine_step.py", "-k", "in_container_runs")),
    Fault(4, "build/trtllm/unsupported_checkpoints.py", '_MIXTURES,\n        frozenset({"W4A16_AWQ"})',
          'frozenset(),\n        frozenset({"W4A16_AWQ"})', (_MATRIX, "-k", "documented")),
    Fault(5, "build/targets/nvidia/build_request.py",
          'return "auto" if spec.target == "pytorch" and spec.quant == "none" else ', "return ",
          ("tests/quantize/test_requests.py", "-k", "fp8_cache")),
    Fault(6, "build/trtllm/unsupported_checkpoints.py", 'frozenset({"phi3"}),\n        _FOUR_BITS',
          "frozenset(),\n        _FOUR_BITS", (_MATRIX, "-k", "documented")),
    Fault(7, "model_repository/gpu_assignment.py", "    if len(needs) > 1:", "    if len(needs) > 99:",
          ("tests/model_repository/test_gpus.py",)),
    Fault(7, _LIBRARY, '    os.environ["CUDA_VISIBLE_DEVICES"] = ids', "    return", (_RUNTIME, "-k", "its_own_gpus")),
    Fault(8, "model_repository/multi_gpu/launch_plan.py", "not name.startswith(_SLURM_PREFIXES)", "name",
          ("tests/model_repository/test_gpus.py",)),
    Fault(9, _LIBRARY, '"top_p": sampling.top_p,\n        "top_k": sampling.top_k,',
          '"top_p": sampling.top_p if sampling.top_p < 1 else None,\n        "top_k": sampling.top_k or None,',
          (_RUNTIME, "-k", "default_sampling_draws")),
    Fault(10, "build/trtllm/backend_parameters.py", 'Parameter("bool", "false")', 'Parameter("bool", "true")',
          ("tests/trtllm/test_cpp_backend.py", "-k", "greedy_log")),
    Fault(11, "build/trtllm/release_profiles.py", '.setdefault("allow_advanced_sampling", True)', ".copy()",
          (_RUNTIME, "-k", "respects_the_temperature")),
    Fault(12, _ENGINE, "if len(word) > 1 or request.min_tokens]", "if len(word) > 1]",
          (_RUNTIME, "-k", "min_tokens_holds")),
    Fault(12, "gateway/triton/request_writer.py", "others if request.min_tokens and self._unknown else []", "[]",
          ("tests/trtllm/test_cpp_backend.py", "-k", "min_tokens_holds")),
    Fault(13, _ENGINE, "sleep(_RETRY_PERIOD)\n            await asyncio.sleep(period)",
          "sleep(_RETRY_PERIOD)\n                return\n            await asyncio.sleep(period)",
          (_RUNTIME, "-k", "events_that_fail")),
    # the library's asynchronous reads end after an empty one
    Fault(13, _ENGINE, "keep(await asyncio.to_thread(getattr(self._llm, method), NO_WAIT))",
          "keep([one async for one in getattr(self._llm, f\"{method}_async\")(NO_WAIT)])",
          (_RUNTIME, "-k", "events_are_read or statistics_are_read")),
    Fault(15, "build/trtllm/release_profiles.py", "return minor < (1, 3) and any(", "return False and any(",
          (_RUNTIME, "-k", "million_steps")),
    # a healthy C++ backend scores the one candidate of a greedy step with 0
    Fault(16, "perf/verify/contract/outputs.py", "    expect(all(score <= 1e-4 for score in scores),",
          '    expect(any(scores), "every log-probability is 0")\n    expect(all(score <= 1e-4 for score in scores),',
          (_DEAD, "-k", "scores_that_are_zero")),
    Fault(17, "perf/verify/contract/sampling.py", "            min(plain.scores) > _CERTAIN,", "            True,",
          (_DEAD, "-k", "never_draws")),
    Fault(18, "perf/verify/contract/kv_cache_reports.py", "        len(seen) > 1,\n", "        True,\n",
          (_DEAD, "-k", "gauges_that_stand_still")),
    Fault(18, "perf/verify/contract/kv_cache_reports.py", "_ROUNDS = 2", "_ROUNDS = 1",
          (_DEAD, "-k", "events_that_end")),
    Fault(18, "perf/verify/contract/stopping.py", "        len(result.ids) >= least,\n", "        True,\n",
          (_DEAD, "-k", "first_end_token_only")),
    Fault(19, "model_repository/doctor/probe_cases.py", '    "tensorrt_llm._torch.pyexecutor.py_executor",\n', "",
          (_DOCKERFILE, "-k", "only_the_drivers")),
)  # fmt: skip
