"""The fields of TensorRT-LLM's LLM API (TorchLlmArgs) as a table: unknown keys are errors there, so they are here.

Source: NVIDIA/TensorRT-LLM `tensorrt_llm/llmapi/llm_args.py`. `since` is the first minor release that has the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "float", "bool", "str", "list", "dict", "config"]


@dataclass(frozen=True)
class Field:
    """`choices` are case-insensitive where `any_case`; `config` names the nested table, or a table per `tag` value."""

    kind: Kind
    default: Any = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    since: tuple[int, int] = (1, 2)
    until: tuple[int, int] | None = None
    config: str | None = None
    any_case: bool = False


Table = Mapping[str, Field]
_LATER = (1, 3)


def _int(default: int | None = None, minimum: float = 0, **more: Any) -> Field:
    return Field("int", default, minimum=minimum, **more)


def _bool(default: bool = False, **more: Any) -> Field:
    return Field("bool", default, **more)


def _str(*choices: str, default: str | None = None, **more: Any) -> Field:
    return Field("str", default, choices, **more)


def _sub(name: str, **more: Any) -> Field:
    return Field("config", None, config=name, **more)


TOP: Table = {
    "model": _str(), "tokenizer": _str(), "tokenizer_mode": _str("auto", "slow", default="auto"),
    "custom_tokenizer": _str(since=_LATER), "skip_tokenizer_init": _bool(), "trust_remote_code": _bool(),
    "revision": _str(), "tokenizer_revision": _str(), "dtype": _str(default="auto"),
    "model_kwargs": Field("dict", since=_LATER),
    "tensor_parallel_size": _int(1, 1), "pipeline_parallel_size": _int(1, 1), "context_parallel_size": _int(1, 1),
    "gpus_per_node": _int(None, 1), "moe_tensor_parallel_size": _int(None, -1),
    "moe_expert_parallel_size": _int(None, -1), "moe_cluster_parallel_size": _int(None, -1),
    "enable_attention_dp": _bool(), "attention_dp_config": _sub("attention_dp"), "enable_lm_head_tp_in_adp": _bool(),
    "pp_partition": Field("list", since=_LATER), "cp_config": Field("dict"),
    "load_format": _str("AUTO", "DUMMY", "VISION_ONLY", default="AUTO", any_case=True),
    "enable_lora": _bool(), "lora_config": _sub("lora"), "peft_cache_config": _sub("peft_cache"),
    "kv_cache_config": _sub("kv_cache"), "enable_chunked_prefill": _bool(),
    "guided_decoding_backend": _str("xgrammar", "llguidance"), "scheduler_config": _sub("scheduler"),
    "cache_transceiver_config": _sub("cache_transceiver"), "sparse_attention_config": Field("dict"),
    "speculative_config": _sub("speculative"), "max_batch_size": _int(2048, 1), "max_input_len": _int(1024, 1),
    "max_seq_len": _int(None, 1), "max_beam_width": _int(1, 1), "max_num_tokens": _int(8192, 1),
    "gather_generation_logits": _bool(), "num_postprocess_workers": _int(0), "postprocess_tokenizer_dir": _str(),
    "reasoning_parser": _str(), "return_perf_metrics": _bool(), "perf_metrics_max_requests": _int(0),
    "orchestrator_type": _str("rpc", "ray"), "otlp_traces_endpoint": _str(since=_LATER),
    "env_overrides": Field("dict", since=_LATER), "backend": _str("pytorch", default="pytorch"),
    "cuda_graph_config": _sub("cuda_graph"), "torch_compile_config": _sub("torch_compile"),
    "disable_overlap_scheduler": _bool(), "moe_config": _sub("moe"), "nvfp4_gemm_config": Field("dict", since=_LATER),
    "attn_backend": _str(default="TRTLLM"), "sampler_type": _str("TRTLLMSampler", "TorchSampler", "auto"),
    "disable_flashinfer_sampling": _bool(since=_LATER), "enable_iter_perf_stats": _bool(),
    "enable_iter_req_stats": _bool(), "iter_stats_max_iterations": _int(), "request_stats_max_iterations": _int(),
    "max_stats_len": _int(1000, since=_LATER), "print_iter_log": _bool(),
    "batch_wait_timeout_ms": Field("float", 0, minimum=0), "batch_wait_timeout_iters": _int(0),
    "batch_wait_max_tokens_ratio": Field("float", 0, minimum=0, maximum=1), "enable_autotuner": _bool(True),
    "enable_min_latency": _bool(), "stream_interval": _int(1, 1), "force_dynamic_quantization": _bool(),
    "allreduce_strategy": _str("AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL",
                               "NCCL_SYMMETRIC", default="AUTO"),
    "checkpoint_format": _str(), "kv_connector_config": _sub("kv_connector"),
    "garbage_collection_gen0_threshold": _int(20000), "mm_encoder_only": _bool(), "ray_worker_extension_cls": _str(),
    "enable_sleep": _bool(since=_LATER),
}  # fmt: skip

KV_CACHE: Table = {
    "enable_block_reuse": _bool(True), "max_tokens": _int(None, 1),
    "free_gpu_memory_fraction": Field("float", 0.9, minimum=0, maximum=1), "max_gpu_total_bytes": _int(0),
    "host_cache_size": _int(None, 0), "max_attention_window": Field("list"), "sink_token_length": _int(None, 0),
    "onboard_blocks": _bool(True, until=(1, 4)), "cross_kv_cache_fraction": Field("float", minimum=0, maximum=1),
    "secondary_offload_min_priority": _int(), "event_buffer_max_size": _int(0),
    "attention_dp_events_gather_period_ms": _int(5), "enable_partial_reuse": _bool(True),
    "copy_on_partial_reuse": _bool(True), "use_uvm": _bool(), "dtype": _str("auto", "fp8", "nvfp4", default="auto"),
    "mamba_ssm_cache_dtype": _str("auto", "float16", "bfloat16", "float32", default="auto"),
    "tokens_per_block": _int(32, 1), "use_kv_cache_manager_v2": _bool(since=_LATER),
    "max_util_for_resume": Field("float", 0.95, minimum=0, maximum=1, since=_LATER),
}  # fmt: skip

SPECULATIVE: Table = {
    "decoding_type": _str("Draft_Target", "Eagle", "Eagle3", "MTP", "NGram", "User_Provided", "SaveState", "AUTO",
                          any_case=True),
    "max_draft_len": _int(None, 0), "max_total_draft_tokens": _int(None, 0), "speculative_model_dir": _str(),
    "speculative_model": _str(since=_LATER), "max_concurrency": _int(None, 1), "draft_len_schedule": Field("dict"),
    "load_format": _str(), "acceptance_window": _int(None, 0),
    "acceptance_length_threshold": Field("float", minimum=0), "allow_advanced_sampling": _bool(),
    "num_nextn_predict_layers": _int(1, 1), "max_matching_ngram_size": _int(2, 1), "is_keep_all": _bool(True),
    "is_use_oldest": _bool(True), "is_public_pool": _bool(True), "eagle3_one_model": _bool(True),
}  # fmt: skip

TABLES: dict[str, Table] = {
    "kv_cache": KV_CACHE,
    "speculative": SPECULATIVE,
    "attention_dp": {"enable_balance": _bool(), "timeout_iters": _int(50), "batching_wait_iters": _int(10)},
    "scheduler": {
        "capacity_scheduler_policy": _str("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
        "context_chunking_policy": _str("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
        "waiting_queue_policy": _str("fcfs", since=_LATER),
    },
    "cuda_graph": {"batch_sizes": Field("list"), "max_batch_size": _int(0), "enable_padding": _bool()},
    "torch_compile": {
        "enable_fullgraph": _bool(True), "enable_inductor": _bool(), "enable_piecewise_cuda_graph": _bool(),
        "capture_num_tokens": Field("list"), "enable_userbuffers": _bool(True), "max_num_streams": _int(1, 1),
    },
    "moe": {
        "backend": _str("AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"),
        "max_num_tokens": _int(None, 1), "load_balancer": Field("dict"), "disable_finalize_fusion": _bool(),
        "use_low_precision_moe_combine": _bool(since=_LATER),
    },
    "cache_transceiver": {
        "backend": _str("DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"), "max_tokens_in_buffer": _int(None, 1),
        "kv_transfer_timeout_ms": _int(None, 1),
    },
    "lora": {
        "lora_dir": Field("list"), "lora_ckpt_source": _str("hf", "nemo", default="hf"), "max_lora_rank": _int(64, 1),
        "lora_target_modules": Field("list"), "trtllm_modules_to_hf_modules": Field("dict"),
        "max_loras": _int(None, 1), "max_cpu_loras": _int(None, 1),
    },
    "peft_cache": {
        "num_host_module_layer": _int(0), "num_device_module_layer": _int(0), "optimal_adapter_size": _int(8, 1),
        "max_adapter_size": _int(64, 1), "num_put_workers": _int(1, 1), "num_ensure_workers": _int(1, 1),
        "num_copy_streams": _int(1, 1), "max_pages_per_block_host": _int(24, 1),
        "max_pages_per_block_device": _int(8, 1),
        "device_cache_percent": Field("float", 0.02, minimum=0, maximum=1), "host_cache_size": _int(1 << 30),
    },
    "kv_connector": {
        "connector_module": _str(), "connector_scheduler_class": _str(), "connector_worker_class": _str(),
    },
}  # fmt: skip
