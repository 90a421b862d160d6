"""NVIDIA's C++ backend as far as config.pbtxt goes: which parameters it reads, how, and what it throws for.

Facts, read on 2026-11-22 from NVIDIA/TensorRT-LLM (11 stored versions of the first file, all alike here):
- `triton_backend/inflight_batcher_llm/src/model_instance_state.cc`: KEYS, and MUST, which are read outside any try
- `triton_backend/inflight_batcher_llm/src/model_state.cc`, `GetParameter<T>`: the parsing and both messages
- `triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt`: INPUTS and OUTPUTS
"""

import re
from typing import Any

MUST = {
    "gpt_model_type": str, "tokenizer_dir": str, "xgrammar_tokenizer_info_path": str, "guided_decoding_backend": str,
}  # fmt: skip
# read within a try: a value that does not parse costs a warning and is not used
KEYS: dict[str, Any] = {
    name: kind
    for kind, names in {
        int: """max_tokens_in_paged_kv_cache sink_token_length max_beam_width iter_stats_max_iterations num_nodes
            request_stats_max_iterations cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms
            lora_cache_max_adapter_size lora_cache_optimal_adapter_size lora_cache_host_memory_bytes
            cuda_graph_cache_size kv_cache_host_memory_bytes lookahead_window_size lookahead_ngram_size
            lookahead_verification_set_size""",
        float: """kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction lora_cache_gpu_memory_fraction
            gpu_weights_percent""",
        bool: """kv_cache_onboard_blocks enable_kv_cache_reuse enable_chunked_context exclude_input_in_output
            multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode normalize_log_probs
            speculative_decoding_fast_logits""",
        list: "max_attention_window_size",
        str: """batch_scheduler_policy decoding_mode gpt_model_path encoder_model_path lora_prefetch_dir gpu_device_ids
            participant_ids executor_worker_path""",
    }.items()
    for name in names.split()
}
# read by others: Triton, and the gateway
OTHERS = {"FORCE_CPU_ONLY_INPUT_TENSORS", "llmops_model_metadata"}
DECODING_MODES = {"top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"}
_PARSERS: dict[Any, Any] = {
    str: str,
    # std::stoi and std::stof take what the text starts with and leave the rest
    int: lambda text: int(re.match(r"\s*[-+]?\d+", text)[0]),
    float: lambda text: float(re.match(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text)[0]),
    bool: lambda text: {"true": True, "1": True, "false": False, "0": False}[_word(text)],
    list: lambda text: [int(part) for part in text.split(",")],
}


def _word(text: str) -> str:
    return text.lower() if text in (text.lower(), text.upper(), text.capitalize()) else text


class LoadError(RuntimeError):
    """An error that the backend throws while it makes the model instance."""


def load(parameters: dict[str, str]) -> dict[str, Any]:
    """The settings the backend would run with. Raises LoadError where it would throw.

    Stricter than the backend in one thing: a value that it would only warn about is an error here.
    """
    for name in MUST:
        if name not in parameters:
            raise LoadError(
                f"unexpected error when creating modelInstanceState: Cannot find parameter with name: {name}"
            )
    if parameters["gpt_model_type"] not in ("V1", "v1", "inflight_batching", "inflight_fused_batching"):
        raise LoadError("Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching.")
    guided = parameters["guided_decoding_backend"] and parameters["xgrammar_tokenizer_info_path"]
    if guided and parameters["guided_decoding_backend"] != "xgrammar":
        raise LoadError("Guided decoding is currently supported with 'xgrammar' backend.")
    read = {name: _read(name, text) for name, text in parameters.items() if name not in OTHERS}
    if read.get("decoding_mode", "top_k") not in DECODING_MODES:
        raise LoadError("decoding_mode parameter is invalid")
    return read


def _read(name: str, text: str) -> Any:
    kind = MUST.get(name) or KEYS.get(name)
    if kind is None:
        raise LoadError(f"the backend reads no parameter {name}")
    try:
        return _PARSERS[kind](text)
    except (ValueError, TypeError, KeyError):
        raise LoadError(f"{name}: {text!r} is no {kind.__name__} there") from None


# name, type, dims; then r: reshaped to a scalar, g: allow_ragged_batch, ! : not optional, t: the type is a choice of
# whoever fills the template (its documented default is given)
INPUTS = """
input_ids INT32 -1 g; encoder_input_features FP16 -1,-1 gt; encoder_output_lengths INT32 1 r;
input_lengths INT32 1 r!; request_output_len INT32 1 r!; num_return_sequences INT32 1 r; draft_input_ids INT32 -1 g;
decoder_input_ids INT32 -1 g; decoder_input_lengths INT32 1 r; draft_logits FP32 -1,-1 gt;
draft_acceptance_threshold FP32 1 r; end_id INT32 1 r; pad_id INT32 1 r; stop_words_list INT32 2,-1 g;
bad_words_list INT32 2,-1 g; embedding_bias FP32 -1 g; beam_width INT32 1 r; temperature FP32 1 r;
runtime_top_k INT32 1 r; runtime_top_p FP32 1 r; runtime_top_p_min FP32 1 r; runtime_top_p_decay FP32 1 r;
runtime_top_p_reset_ids INT32 1 r; len_penalty FP32 1 r; early_stopping BOOL 1 r; repetition_penalty FP32 1 r;
min_tokens INT32 1 r; beam_search_diversity_rate FP32 1 r; presence_penalty FP32 1 r; frequency_penalty FP32 1 r;
seed UINT64 1 r; return_log_probs BOOL 1 r; return_context_logits BOOL 1 r; return_generation_logits BOOL 1 r;
return_perf_metrics BOOL 1 r; return_num_input_tokens BOOL 1 r; return_num_output_tokens BOOL 1 r;
exclude_input_in_output BOOL 1 r; stop BOOL 1 r; streaming BOOL 1 r; prompt_embedding_table FP16 -1,-1 gt;
prompt_table_extra_ids UINT64 -1 g; prompt_vocab_size INT32 1 r; cross_attention_mask BOOL -1,-1 g;
mrope_rotary_cos_sin FP32 -1 -; mrope_position_deltas INT64 1 -; lora_task_id UINT64 1 r; lora_weights FP16 -1,-1 g;
lora_config INT32 -1,3 g; context_phase_params UINT8 -1 g; skip_cross_attn_blocks BOOL 1 g;
retention_token_range_starts INT32 -1 g; retention_token_range_ends INT32 -1 g;
retention_token_range_priorities INT32 -1 g; retention_token_range_durations_ms INT32 -1 g;
retention_decode_priority INT32 1 g; retention_decode_duration_ms INT32 1 g; guided_decoding_guide_type STRING 1 g;
guided_decoding_guide STRING 1 g; lookahead_window_size INT32 1 g; lookahead_ngram_size INT32 1 g;
lookahead_verification_set_size INT32 1 g
"""
OUTPUTS = """
output_ids INT32 -1,-1; sequence_length INT32 -1; cum_log_probs FP32 -1; output_log_probs FP32 -1,-1;
context_logits FP32 -1,-1; generation_logits FP32 -1,-1,-1; batch_index INT32 1; sequence_index INT32 1;
context_phase_params UINT8 -1; kv_cache_alloc_new_blocks INT32 1; kv_cache_reused_blocks INT32 1;
kv_cache_alloc_total_blocks INT32 1; arrival_time_ns INT64 1; first_scheduled_time_ns INT64 1;
first_token_time_ns INT64 1; last_token_time_ns INT64 1; acceptance_rate FP32 1; total_accepted_draft_tokens INT32 1;
total_draft_tokens INT32 1; num_input_tokens INT32 1; num_output_tokens INT32 1
"""


def as_table(tensors: Any) -> set[str]:
    """Tensors of a parsed ModelConfig in the rows of INPUTS and OUTPUTS, without the mark `t`."""
    rows = set()
    for tensor in tensors:
        types = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        row = [tensor.name, types[tensor.data_type].name.removeprefix("TYPE_"), ",".join(map(str, tensor.dims))]
        if tensor.DESCRIPTOR.name == "ModelInput":
            marks = "r" * tensor.HasField("reshape") + "g" * tensor.allow_ragged_batch + "!" * (not tensor.optional)
            row.append(marks or "-")
        rows.add(" ".join(row))
    return rows


def table(text: str) -> set[str]:
    return {row.strip().replace(" gt", " g") for row in text.split(";")}
