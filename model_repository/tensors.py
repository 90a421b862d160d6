"""The tensors of the four models: TensorRT-LLM's own names, types and shapes (its `inflight_batcher_llm` repository).

Shapes are per request, without the batch dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

INT32, INT64, UINT8, UINT64 = "TYPE_INT32", "TYPE_INT64", "TYPE_UINT8", "TYPE_UINT64"
FP16, FP32, BOOL, STRING = "TYPE_FP16", "TYPE_FP32", "TYPE_BOOL", "TYPE_STRING"


@dataclass(frozen=True)
class Tensor:
    """One input or output. `scalar`: the backend sees [batch], not [batch, 1]; `ragged`: lengths differ in a batch."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False
    ragged: bool = False


def scalars(data_type: str, names: str) -> list[Tensor]:
    return [Tensor(name, data_type, scalar=True) for name in names.split()]


def ragged(data_type: str, dims: tuple[int, ...], names: str) -> list[Tensor]:
    return [Tensor(name, data_type, dims, ragged=True) for name in names.split()]


def required(tensor: Tensor) -> Tensor:
    return replace(tensor, optional=False)


ENGINE_INPUTS: list[Tensor] = [
    *ragged(INT32, (-1,), "input_ids"),
    *(required(t) for t in scalars(INT32, "input_lengths request_output_len")),
    *ragged(FP16, (-1, -1), "encoder_input_features"),
    *scalars(INT32, "encoder_output_lengths num_return_sequences"),
    *ragged(INT32, (-1,), "draft_input_ids decoder_input_ids"),
    *scalars(INT32, "decoder_input_lengths"),
    *ragged(FP32, (-1, -1), "draft_logits"),
    *scalars(FP32, "draft_acceptance_threshold"),
    *scalars(INT32, "end_id pad_id"),
    *ragged(INT32, (2, -1), "stop_words_list bad_words_list"),
    *ragged(FP32, (-1,), "embedding_bias"),
    *scalars(INT32, "beam_width runtime_top_k"),
    *scalars(FP32, "temperature runtime_top_p runtime_top_p_min runtime_top_p_decay"),
    *scalars(INT32, "runtime_top_p_reset_ids"),
    *scalars(FP32, "len_penalty"),
    *scalars(BOOL, "early_stopping"),
    *scalars(FP32, "repetition_penalty"),
    *scalars(INT32, "min_tokens"),
    *scalars(FP32, "beam_search_diversity_rate presence_penalty frequency_penalty"),
    *scalars(UINT64, "seed"),
    *scalars(BOOL, "return_log_probs return_context_logits return_generation_logits return_perf_metrics"),
    *scalars(BOOL, "return_num_input_tokens return_num_output_tokens exclude_input_in_output stop streaming"),
    *ragged(FP16, (-1, -1), "prompt_embedding_table"),
    *ragged(UINT64, (-1,), "prompt_table_extra_ids"),
    *scalars(INT32, "prompt_vocab_size"),
    *ragged(BOOL, (-1, -1), "cross_attention_mask"),
    Tensor("mrope_rotary_cos_sin", FP32, (-1,)),
    Tensor("mrope_position_deltas", INT64),
    *scalars(UINT64, "lora_task_id"),
    *ragged(FP16, (-1, -1), "lora_weights"),
    *ragged(INT32, (-1, 3), "lora_config"),
    *ragged(UINT8, (-1,), "context_phase_params"),
    *ragged(BOOL, (1,), "skip_cross_attn_blocks"),
    *ragged(INT32, (-1,), "retention_token_range_starts retention_token_range_ends retention_token_range_priorities"),
    *ragged(INT32, (-1,), "retention_token_range_durations_ms"),
    *ragged(INT32, (1,), "retention_decode_priority retention_decode_duration_ms"),
    *ragged(STRING, (1,), "guided_decoding_guide_type guided_decoding_guide"),
    *ragged(INT32, (1,), "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size"),
]

ENGINE_OUTPUTS: list[Tensor] = [
    Tensor("output_ids", INT32, (-1, -1)),
    Tensor("sequence_length", INT32, (-1,)),
    Tensor("cum_log_probs", FP32, (-1,)),
    Tensor("output_log_probs", FP32, (-1, -1)),
    Tensor("context_logits", FP32, (-1, -1)),
    Tensor("generation_logits", FP32, (-1, -1, -1)),
    Tensor("batch_index", INT32),
    Tensor("sequence_index", INT32),
    Tensor("context_phase_params", UINT8, (-1,)),
    *(Tensor(f"kv_cache_{name}", INT32) for name in ("alloc_new_blocks", "reused_blocks", "alloc_total_blocks")),
    *(
        Tensor(f"{name}_ns", INT64)
        for name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    ),
    Tensor("acceptance_rate", FP32),
    *(Tensor(name, INT32) for name in ("total_accepted_draft_tokens", "total_draft_tokens")),
    *(Tensor(name, INT32) for name in ("num_input_tokens", "num_output_tokens")),
]

# What only the models of this project have, on top of NVIDIA's.
MIN_P = scalars(FP32, "runtime_min_p")
CALLER = scalars(STRING, "caller")
RETURN_CONTEXT = scalars(BOOL, "return_context_ids")
CONTEXT_IDS = Tensor("context_ids", INT32, (-1, -1))
FINISHED = Tensor("finished", BOOL)

# Step streams (docs/contract.md): what a gateway may say, and what it hears.
STEP_INPUTS: list[Tensor] = [
    Tensor("subscription", STRING),
    Tensor("submissions", STRING, (-1,)),
    Tensor("slot", INT32),
    Tensor("resume_from", INT64),
    Tensor("acknowledge", INT64),
    Tensor("drain", BOOL),
]
STEP_OUTPUTS: list[Tensor] = [
    Tensor("step_index", INT64),
    Tensor("step_entries", INT32, (-1, 4)),
    Tensor("step_tokens", INT32, (-1,)),
    Tensor("step_log_probs", FP32, (-1,)),
    Tensor("step_errors", STRING, (-1,)),
]

# All that an engine model of ours takes and gives, whatever library runs in it.
OUR_INPUTS: list[Tensor] = [*ENGINE_INPUTS, *MIN_P, *CALLER, *RETURN_CONTEXT, *STEP_INPUTS]
OUR_OUTPUTS: list[Tensor] = [*ENGINE_OUTPUTS, CONTEXT_IDS, FINISHED, *STEP_OUTPUTS]

PREPROCESSING_INPUTS: list[Tensor] = [
    Tensor("QUERY", STRING, optional=False),
    Tensor("REQUEST_OUTPUT_LEN", INT32, optional=False),
    *(Tensor(name, STRING, (-1,)) for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")),
    Tensor("EMBEDDING_BIAS_WEIGHTS", FP32, (-1,)),
    Tensor("END_ID", INT32),
    Tensor("PAD_ID", INT32),
]

PREPROCESSING_OUTPUTS: list[Tensor] = [
    Tensor("INPUT_ID", INT32, (-1,)),
    Tensor("REQUEST_INPUT_LEN", INT32),
    Tensor("BAD_WORDS_IDS", INT32, (2, -1)),
    Tensor("STOP_WORDS_IDS", INT32, (2, -1)),
    Tensor("EMBEDDING_BIAS", FP32, (-1,)),
    Tensor("REQUEST_OUTPUT_LEN", INT32, (-1,)),
    Tensor("OUT_END_ID", INT32),
    Tensor("OUT_PAD_ID", INT32),
]
RETURN_CONTEXT_OUT = Tensor("RETURN_CONTEXT_IDS", BOOL)

POSTPROCESSING_INPUTS: list[Tensor] = [
    Tensor("TOKENS_BATCH", INT32, (-1, -1), optional=False),
    Tensor("SEQUENCE_LENGTH", INT32, (-1,), optional=False),
    Tensor("CONTEXT_IDS", INT32, (-1, -1)),
    Tensor("FINISHED", BOOL),
]

POSTPROCESSING_OUTPUTS: list[Tensor] = [Tensor("OUTPUT", STRING, (-1,))]

# ensemble input -> engine input, where nothing has to be tokenised
ENSEMBLE_TO_ENGINE: dict[str, str] = {
    "num_return_sequences": "num_return_sequences",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "length_penalty": "len_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "exclude_input_in_output": "exclude_input_in_output",
    "beam_width": "beam_width",
    "stream": "streaming",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "prompt_table_extra_id": "prompt_table_extra_ids",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}

# ensemble input -> preprocessing input
ENSEMBLE_TO_PREPROCESSING: dict[str, str] = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
}

# preprocessing output -> engine input
PREPROCESSING_TO_ENGINE: dict[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
