"""The cases of the library probe.

The cases cover every kind of argument that `llmops build` can produce, and every kind of request.
"""

from typing import Any

from llmops.build.engine_folder.manifest import EngineLimits, Parallelism
from llmops.build.quant_formats import FORMATS
from llmops.build.trtllm.backend_parameters import PARAMETERS
from llmops.build.trtllm.container_images import TrtllmImage
from llmops.build.trtllm.image_selection import release_of
from llmops.build.trtllm.llm_args import make_llm_args
from llmops.build.trtllm.release_profiles import CHECKED, profile_of_release, profiles_per_release

#: Modules that `llmops serve` imports for target pytorch. The executor's module imports
#: tensorrt_llm.serve, which needs a recent openai.
_MODULES = (
    "tensorrt_llm",
    "tensorrt_llm.executor",
    "tensorrt_llm.llmapi",
    "tensorrt_llm.llmapi.llm_args",
    "tensorrt_llm._torch.pyexecutor.py_executor",
    "tensorrt_llm.serve.responses_utils",
)
_SPECULATION: dict[str, dict[str, Any]] = {
    "": {},
    "NGram": {"decoding_type": "NGram", "max_draft_len": 4},
    "MTP": {"decoding_type": "MTP"},
    "Eagle3": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/draft"},
    "Draft_Target": {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "/draft"},
}
#: Quantization algorithms of the checkpoints that target pytorch serves, in the library's names.
_ALGORITHMS = tuple(
    quant_format.algorithm
    for quant_format in FORMATS.values()
    if "pytorch" in quant_format.targets and quant_format.algorithm
)
_LOOKAHEAD = dict.fromkeys(("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"), "7")
#: Parameters of TensorRT engines that differ from the defaults.
_EXECUTOR: dict[str, dict[str, str]] = {
    "defaults": {},
    "lookahead": {"decoding_mode": "lookahead", **_LOOKAHEAD},
    "everything": {
        "batch_scheduler_policy": "max_utilization", "kv_cache_host_memory_bytes": "1000000",
        "max_tokens_in_paged_kv_cache": "4096", "max_attention_window_size": "512,1024", "sink_token_length": "4",
        "kv_cache_onboard_blocks": "true", "lora_prefetch_dir": "/adapters", "lora_cache_max_adapter_size": "64",
        "lora_cache_optimal_adapter_size": "8", "lora_cache_host_memory_bytes": "1000000",
        "lora_cache_gpu_memory_fraction": "0.05", "multi_block_mode": "true", "enable_context_fmha_fp32_acc": "true",
        "cuda_graph_mode": "true", "cuda_graph_cache_size": "8", "gpu_weights_percent": "1.0",
        "recv_poll_period_ms": "1", "iter_stats_max_iterations": "100",
    },
}  # fmt: skip
_REQUESTS: dict[str, dict[str, Any]] = {
    "OpenAI's defaults": {},
    "greedy": {"sampling": {"temperature": 0.0}, "log_probs": True},
    "everything": {
        "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7,
                     "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        "end_ids": [2, 9], "stop_words": [[4], [5, 6]], "min_tokens": 3,
    },
    "json": {"guide": ["json", ""], "end_ids": [2]},
    "json_schema": {"guide": ["json_schema", '{"type": "object"}'], "end_ids": [2]},
    "regex": {"guide": ["regex", "[a-z]+"], "end_ids": [2]},
    "ebnf_grammar": {"guide": ["ebnf_grammar", 'root ::= "a"'], "end_ids": [2]},
}  # fmt: skip


def make_probe_task(image: TrtllmImage | None) -> dict[str, Any]:
    """Return the probe's task for the release of `image`.

    Without an image, the task is for the oldest release that has the target.
    """
    version = image.tensorrt_llm if image is not None else CHECKED[min(CHECKED)]
    log_probs = profile_of_release({}, version).log_probs
    return {
        "modules": _MODULES if image is None or "pytorch" in image.targets else _MODULES[:1],
        "profiles": _profiles(version),
        "requests": _REQUESTS,
        "algorithms": _ALGORITHMS,
        "log_probs": log_probs,
        "executor": _executor() if image is None or "tensorrt" in image.targets else {},
    }


def _executor() -> dict[str, dict[str, str]]:
    defaults = {name: one.default for name, one in PARAMETERS.items() if one.default}
    return {name: {**defaults, **given} for name, given in _EXECUTOR.items()}


def _profiles(version: str) -> dict[str, Any]:
    limits = EngineLimits(max_batch_size=64, max_seq_len=4096, max_num_tokens=8192)
    made: dict[str, Any] = {}
    if release_of(version) < (1, 2):
        return made
    for kv_cache in ("auto", "fp8"):
        for tp, ep in ((1, 1), (8, 1), (8, 8)):
            parallel, is_mixture = Parallelism(tp_size=tp, ep_size=ep), ep > 1
            for name, speculative in _SPECULATION.items():
                overrides = {"speculative_config": speculative} if speculative else {}
                arguments = make_llm_args(limits, parallel, kv_cache, overrides, version, is_mixture=is_mixture)
                key = f"kv {kv_cache}, tp {tp}{', experts' if is_mixture else ''}{', ' + name if name else ''}"
                made[key] = [one.as_json() for one in profiles_per_release(arguments)]
    return made
