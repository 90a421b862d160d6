"""The fields of TensorRT-LLM's LLM API (TorchLlmArgs) as a table.

The LLM API rejects unknown fields, and so does llmops.

Source: NVIDIA/TensorRT-LLM, 1.2.1: `tensorrt_llm/llmapi/llm_args.py` as published with its
documentation; 1.3: the same file and `tensorrt_llm/usage/llm_args_golden_manifest.json` at 0004396,
shortly before 1.3.0rc29, both read 2026-11-22, and the class pages of 1.3.0rc29's documentation
(`llm-api/reference`: LLM, MTP, Eagle3) with its list of all fields (`developer-guide/telemetry`),
read 2026-11-27.

1.4 is known in part, and no image has it: its fields are here for the message that an earlier
release lacks them. Read 2026-11-27 from its documentation: of 1.4.0rc4 the classes SchedulerConfig,
MoeConfig, CacheTransceiverConfig, MTP, Eagle3, NGram and SA, the first 25 fields of KvCacheConfig
and the first 29 of TorchLlmArgs; of 1.4.0rc1 an example configuration (`iter_perf_stats_interval`).
These classes keep each field of 1.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["int", "float", "bool", "str", "list", "dict", "config", "bool or auto", "dict or path"]


@dataclass(frozen=True)
class Field:
    """A field of the LLM API.

    With `any_case`, values match `choices` in any case. A choice like "WIDEEP <1.3" exists only in
    some releases. `config` names the table of a group of fields. `since` is the first minor release
    with the field, and `until` the first without the field. `gone` is the reason for which the
    removal loses no function, or empty if the removal loses a function.
    """

    kind: Kind
    default: Any = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    since: tuple[int, int] = (1, 2)
    until: tuple[int, int] | None = None
    config: str | None = None
    any_case: bool = False
    gone: str = ""

    def choices_of(self, minor: tuple[int, int]) -> tuple[str, ...]:
        """Return the choices of the field in a minor release."""
        return tuple(choice.split()[0] for choice in self.choices if _has(choice, minor))


Table = Mapping[str, Field]
_LATER = (1, 3)
_NEXT = (1, 4)


def _has(choice: str, minor: tuple[int, int]) -> bool:
    _, _, rule = choice.partition(" ")
    later = minor >= _LATER
    return {"": True, "<1.3": not later, ">=1.3": later}[rule]


def _until(field: Field, gone: str = "") -> Field:
    """Return a copy of `field` that is marked as removed in 1.3, with the reason `gone`."""
    return replace(field, until=_LATER, gone=gone)


def _later(kind: Kind, *names: str, since: tuple[int, int] = _LATER) -> dict[str, Field]:
    return {name: Field(kind, since=since) for name in names}


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
    "custom_tokenizer": _str(), "skip_tokenizer_init": _bool(), "trust_remote_code": _bool(),
    "revision": _str(), "tokenizer_revision": _str(), "dtype": _str(default="auto"),
    "model_kwargs": Field("dict", since=_LATER),
    "tensor_parallel_size": _int(1, 1), "pipeline_parallel_size": _int(1, 1), "context_parallel_size": _int(1, 1),
    "gpus_per_node": _int(None, 1), "moe_tensor_parallel_size": _int(None, -1),
    "moe_expert_parallel_size": _int(None, -1), "moe_cluster_parallel_size": _int(None, -1),
    "enable_attention_dp": _bool(), "attention_dp_config": _sub("attention_dp"), "enable_lm_head_tp_in_adp": _bool(),
    "pp_partition": Field("list"), "cp_config": Field("dict"),
    "load_format": _str("AUTO", "DUMMY", "VISION_ONLY", "GMS >=1.3", default="AUTO", any_case=True),
    "enable_lora": _bool(), "lora_config": _sub("lora"), "peft_cache_config": _sub("peft_cache"),
    "kv_cache_config": _sub("kv_cache"), "enable_chunked_prefill": _bool(),
    "guided_decoding_backend": _str("xgrammar", "llguidance"), "scheduler_config": _sub("scheduler"),
    "cache_transceiver_config": _sub("cache_transceiver"), "sparse_attention_config": Field("dict"),
    "speculative_config": _sub("speculative"), "max_batch_size": _int(2048, 1), "max_input_len": _int(1024, 1),
    "max_seq_len": _int(None, 1), "max_beam_width": _int(1, 1), "max_num_tokens": _int(8192, 1),
    "gather_generation_logits": _bool(), "reasoning_parser": _str(), "return_perf_metrics": _bool(),
    "perf_metrics_max_requests": _int(0), "orchestrator_type": _str(), "otlp_traces_endpoint": _str(),
    "env_overrides": Field("dict"), "backend": _str("pytorch", default="pytorch"),
    "cuda_graph_config": _sub("cuda_graph"), "torch_compile_config": _sub("torch_compile"),
    "disable_overlap_scheduler": _bool(), "moe_config": _sub("moe"), "nvfp4_gemm_config": Field("dict"),
    # 1.2's py_executor_creator.py compares the exact name.
    "attn_backend": _str("TRTLLM", "FLASHINFER", "VANILLA", default="TRTLLM"),
    "sampler_type": _until(_str("TRTLLMSampler", "TorchSampler", "auto"), "1.3 has one sampler for all requests"),
    "enable_iter_perf_stats": _bool(),
    "enable_iter_req_stats": _bool(), "iter_stats_max_iterations": _int(None, -1),
    "request_stats_max_iterations": _int(None, -1),
    "max_stats_len": _int(1000, -1), "print_iter_log": _bool(),
    "batch_wait_timeout_ms": Field("float", 0, minimum=0), "batch_wait_timeout_iters": _int(0),
    "batch_wait_max_tokens_ratio": Field("float", 0, minimum=0, maximum=1), "enable_autotuner": _bool(True),
    "enable_min_latency": _bool(), "stream_interval": _int(1, 1), "force_dynamic_quantization": _bool(),
    "allreduce_strategy": _str("AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL",
                               "NCCL_SYMMETRIC", default="AUTO"),
    "checkpoint_format": _str(), "kv_connector_config": _sub("kv_connector"),
    "garbage_collection_gen0_threshold": _int(20000), "mm_encoder_only": _bool(), "ray_worker_extension_cls": _str(),
    "generation_config": _str("auto", "trtllm", since=_LATER), "telemetry_config": _sub("telemetry", since=_LATER),
    "checkpoint_io_policy": _str("auto", "native", "rank_striped_read_ahead", since=_LATER),
    "prefill_cuda_graph_backend": _str("disabled", "piecewise", "breakable", since=_LATER),
    **_later("list", "prefill_capture_num_tokens"), **_later("float", "mla_skip_correction_threshold"),
    "disable_flashinfer_sampling": _until(_bool()), "enable_sleep": _until(_bool()),
    "fail_fast_on_attention_window_too_large": _until(_bool()),
    "sampler_force_async_worker": _bool(), "enable_layerwise_nvtx_marker": _bool(),
    **_later("bool", "enable_early_first_token_response", "enable_in_graph_sampling",
             "enable_low_latency_host_dispatch", "enable_energy_metrics", "enable_resource_governor",
             "enable_tokenization_cache", "disable_mm_encoder", "enable_mla_skip_correction", "use_fine_grained_sync",
             "use_cute_dsl_blockscaling_mm", "use_cute_dsl_blockscaling_bmm", "use_cute_dsl_bf16_bmm",
             "use_cute_dsl_bf16_gemm"),
    **_later("dict", "prometheus_metrics_config", "kv_cache_compression_config", "multimodal_config", "dwdp_config",
             "gms_config", "mx_config", "sleep_config", "reorder_policy_config"),
    **_later("int", "encoder_max_batch_size", "encoder_max_num_tokens"), **_later("str", "perf_metrics_output_dir"),
    **_later("int", "iter_perf_stats_interval", since=_NEXT),
}  # fmt: skip

KV_CACHE: Table = {
    "enable_block_reuse": _bool(True), "max_tokens": _int(None, 1),
    "free_gpu_memory_fraction": Field("float", 0.9, minimum=0, maximum=1), "max_gpu_total_bytes": _int(0),
    "host_cache_size": _int(None, 0), "max_attention_window": Field("list"), "sink_token_length": _int(None, 0),
    "onboard_blocks": _until(_bool(True), "1.3 always does so"),
    "cross_kv_cache_fraction": Field("float", minimum=0, maximum=1),
    "secondary_offload_min_priority": _int(), "event_buffer_max_size": _int(0),
    "attention_dp_events_gather_period_ms": _int(5), "enable_partial_reuse": _bool(True),
    "copy_on_partial_reuse": _bool(True), "use_uvm": _bool(), 
    "dtype": _str("auto", "fp8", "nvfp4", "fp8_ds_mla >=1.3", "float16 >=1.3", "bfloat16 >=1.3", "float32 >=1.3",
                  default="auto"),
    "mamba_ssm_cache_dtype": _str("auto", "float16", "bfloat16", "float32", default="auto"),
    "tokens_per_block": _int(32, 1), "use_kv_cache_manager_v2": Field("bool or auto", "auto", since=_LATER),
    "max_util_for_resume": Field("float", 0.95, minimum=0, maximum=1, since=_LATER),
    **_later("int", "disk_cache_size", "disk_prefetch_num_reqs", "avg_seq_len", "iteration_stats_interval",
             "fp8_context_mla_kv_len_cap", "mamba_ssm_philox_rounds", "mamba_state_cache_interval",
             "kv_pool_rebalance_min_sampled_kv_caches", "kv_pool_rebalance_target_ratio_update_interval",
             "kv_pool_rebalance_check_interval"),
    **_later("float", "kv_pool_rebalance_cooldown_secs", "kv_pool_rebalance_ratio_threshold",
             "kv_pool_rebalance_moving_average_decay"),
    **_later("str", "disk_cache_path", "kv_cache_event_hash_algo"),
    **_later("bool", "enable_swa_scratch_reuse", "enable_kv_pool_rebalance", "mamba_ssm_stochastic_rounding"),
    **_later("dict", "block_reuse_config", "kv_events_config", "mamba_state_config"), **_later("list", "pool_ratio"),
    **_later("bool", "host_cache_bind_to_gpu_numa_node", "disk_keep_copy_after_restore", "disk_write_through",
             since=_NEXT),
    **_later("int", "disk_io_threads", "cold_tier_offload_min_priority", since=_NEXT),
    **_later("float", "disk_protected_copy_fraction", since=_NEXT),
}  # fmt: skip

#: Values of decoding_type, by the names of 1.3, which engines keep -> the name in 1.2, or None if
#: 1.2's PyTorch backend lacks the type. Medusa and Lookahead are missing because only TensorRT
#: engines have them, and User_Provided because it takes Python objects.
DECODING_TYPES: dict[str, str | None] = {
    "NGram": "NGram", "MTP": "MTP", "Eagle3": "Eagle", "Draft_Target": "DraftTarget", "AUTO": "AUTO",
    "SaveState": "SaveState", "SA": None, "PARD": None, "DFlash": None, "DSpark": None,
}  # fmt: skip

SPECULATIVE: Table = {
    "decoding_type": _str(*(name if old else f"{name} >=1.3" for name, old in DECODING_TYPES.items())),
    "max_draft_len": _int(None, 0), "max_total_draft_tokens": _int(None, 0), "speculative_model": _str(),
    "max_concurrency": _int(None, 1), "draft_len_schedule": Field("dict"), "load_format": _str(),
    "acceptance_window": _until(_int(None, 0)),
    "acceptance_length_threshold": _until(Field("float", minimum=0)),
    "acceptance_rate_window_size": _int(None, 0, since=_LATER),
    "acceptance_rate_threshold": Field("float", minimum=0, maximum=1, since=_LATER),
    "allow_advanced_sampling": _bool(), "use_rejection_sampling": _bool(since=_LATER),
    "enable_penalty": _bool(since=_LATER),
    "advanced_sampling_mode": _str("full", "no_topk", "no_topp", "no_topk_no_topp", since=_LATER),
    "num_nextn_predict_layers": _int(1, 1), "use_relaxed_acceptance_for_thinking": _bool(), "relaxed_topk": _int(1, 1),
    "relaxed_delta": Field("float", 0.0, minimum=0), "use_mtp_vanilla": _bool(),
    "mtp_eagle_one_model": _until(_bool(True), "1.3 always does so"),
    "begin_thinking_phase_token": _int(128798), "end_thinking_phase_token": _int(128799),
    "max_matching_ngram_size": _int(2, -1), "is_keep_all": _bool(True), "is_use_oldest": _bool(True),
    "is_public_pool": _bool(True), "enable_global_pool": _bool(since=_LATER), "global_pool_size": _int(since=_LATER),
    "eagle3_one_model": _until(_bool(True), "1.3 always does so"), "eagle3_layers_to_capture": Field("list"),
    "eagle3_model_arch": _str("llama3", "mistral_large3", default="llama3"), "use_dynamic_tree": _bool(),
    "dynamic_tree_max_topK": _int(None, 1), "sa_config": Field("dict", since=_LATER),
    "output_directory": _str(), "write_interval": _int(20, 1), "file_prefix": _str(),
    "mask_token_id": _int(since=_LATER), "block_size": _int(None, 1, since=_LATER),
    "target_layer_ids": Field("list", since=_LATER), "markov_rank": _int(since=_LATER),
    "markov_head_type": _str("vanilla", "gated", "rnn", since=_LATER),
    "attention_backend": _str("VANILLA", "TRTLLM", "FA4", default="VANILLA", since=_LATER),
    "moe_backend": _str(since=_LATER),
    **_later("str", "moe_tactic", "draft_lm_head_dtype", "draft_moe_dtype", since=_NEXT),
    **_later("int", "spec_dec_variant", since=_NEXT),
}  # fmt: skip

#: Fields of SPECULATIVE that only some types have, by type. Each class upstream has
#: `extra="forbid"`. Fields that are not listed belong to all types.
OWN_SPECULATIVE: dict[str, tuple[str, ...]] = {
    "NGram": ("max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"),
    "MTP": ("num_nextn_predict_layers", "use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta",
            "use_mtp_vanilla", "mtp_eagle_one_model", "begin_thinking_phase_token", "end_thinking_phase_token",
            "use_dynamic_tree >=1.3", "dynamic_tree_max_topK >=1.3", "sa_config", "draft_lm_head_dtype",
            "draft_moe_dtype"),
    "Eagle3": ("eagle3_one_model", "eagle3_layers_to_capture", "eagle3_model_arch", "use_dynamic_tree",
               "dynamic_tree_max_topK", "sa_config"),
    "SaveState": ("output_directory", "write_interval", "file_prefix", "eagle3_layers_to_capture"),
    "SA": ("max_matching_ngram_size", "enable_global_pool", "global_pool_size"),
    "PARD": ("mask_token_id", "sa_config"), "DFlash": ("mask_token_id", "target_layer_ids", "attention_backend"),
    "DSpark": ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "markov_head_type",
               "attention_backend"),
}  # fmt: skip


def owners(name: str, minor: tuple[int, int]) -> list[str]:
    """Return the types of speculation that alone have the field `name` in a minor release.

    The result is empty for a field that all types have.
    """
    return [
        kind
        for kind in SPECULATIVE["decoding_type"].choices_of(minor)
        if any(one.split()[0] == name and _has(one, minor) for one in OWN_SPECULATIVE.get(kind, ()))
    ]


TABLES: dict[str, Table] = {
    "kv_cache": KV_CACHE,
    "speculative": SPECULATIVE,
    "attention_dp": {
        "enable_balance": _bool(), "timeout_iters": _int(50), "batching_wait_iters": _int(10),
        **_later("bool", "enable_kv_cache_aware_routing", "kv_cache_routing_account_for_in_transfer",
                 "kv_cache_routing_cold_start_warmup", "kv_cache_routing_conversation_affinity"),
        **_later("float", "kv_cache_routing_fair_share_multiplier", "kv_cache_routing_load_balance_weight",
                 "kv_cache_routing_match_rate_threshold"),
        **_later("int", "kv_cache_routing_max_sessions"),
        "kv_cache_routing_new_conv_placement": _str("round_robin", "least_queued", "least_tokens", since=_LATER),
    },
    "scheduler": {
        "capacity_scheduler_policy": _str("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
        "context_chunking_policy": _str("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK >=1.3"),
        "waiting_queue_policy": _str("fcfs", "priority", since=_LATER),
        **_later("bool", "enable_prefix_aware_scheduling", "use_python_scheduler"),
        **_later("dict", "gen_preemption", since=_NEXT), **_later("str", "context_scheduling_policy", since=_NEXT),
        **_later("int", "max_gen_init_admissions_per_pass", "context_starvation_iterations", since=_NEXT),
    },
    "cuda_graph": {
        "batch_sizes": Field("list"), "max_batch_size": _int(0), "enable_padding": _bool(),
        "mode": _str("decode", since=_LATER),
    },
    "torch_compile": {
        "enable_fullgraph": _bool(True), "enable_inductor": _bool(), "enable_piecewise_cuda_graph": _bool(),
        "capture_num_tokens": Field("list"), "enable_userbuffers": _bool(True), "max_num_streams": _int(1, 1),
    },
    "moe": {
        "backend": _str("AUTO >=1.3", "CUTLASS", "CUTEDSL", "WIDEEP <1.3", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON",
                        "DENSEGEMM >=1.3", "MARLIN >=1.3", "MEGAMOE_DEEPGEMM >=1.3", "MEGAMOE_CUTEDSL >=1.3",
                        "CUTEDSL_FC12 >=1.3"),
        "max_num_tokens": _int(None, 1), "load_balancer": Field("dict or path"), "disable_finalize_fusion": _bool(),
        "use_low_precision_moe_combine": _bool(), **_later("str", "tactic", since=_NEXT),
        **_later("bool", "megamoe_fuse_shared_expert", since=_NEXT),
    },
    "cache_transceiver": {
        "backend": _str("DEFAULT", "UCX", "NIXL", "MPI", "MOONCAKE"), "max_tokens_in_buffer": _int(None, 1),
        "kv_transfer_timeout_ms": _int(None, 1), "kv_transfer_sender_future_timeout_ms": _int(1000, 1),
        "transceiver_runtime": _str("CPP", "PYTHON", "auto", since=_LATER),
        **_later("int", "kv_transfer_poll_interval_ms", "kv_cache_bounce_size_mb"),
        **_later("bool", "enable_pipelined_transfer"), **_later("bool", "agent_bounce_buffer_enable", since=_NEXT),
        **_later("dict", "agent_bounce_params", since=_NEXT),
    },
    "lora": {
        "lora_dir": Field("list"), "lora_ckpt_source": _str("hf", "nemo", default="hf"), "max_lora_rank": _int(64, 1),
        "lora_target_modules": Field("list"), "trtllm_modules_to_hf_modules": Field("dict"),
        "max_loras": _int(None, 1), "max_cpu_loras": _int(None, 1), "swap_gate_up_proj_lora_b_weight": _bool(True),
        **_later("bool", "overlap_lora_and_base", "cuda_graph_specialize_lora"),
    },
    "peft_cache": {
        "num_host_module_layer": _int(0), "num_device_module_layer": _int(0), "optimal_adapter_size": _int(8, 1),
        "max_adapter_size": _int(64, 1), "num_put_workers": _int(1, 1), "num_ensure_workers": _int(1, 1),
        "num_copy_streams": _int(1, 1), "max_pages_per_block_host": _int(24, 1),
        "max_pages_per_block_device": _int(8, 1),
        "device_cache_percent": Field("float", 0.02, minimum=0, maximum=1), "host_cache_size": _int(1 << 30),
    },
    "telemetry": {"disabled": _bool()},
    "kv_connector": {
        "connector": _str("lmcache", "lmcache-mp", "kvbm", since=_LATER), "server_url": _str(since=_LATER),
        "connector_module": _str(), "connector_scheduler_class": _str(), "connector_worker_class": _str(),
    },
}  # fmt: skip
