"""Tensors, flags, name suffixes and parameters shared by the gateway and the models inside Triton.

The module has only data, and needs only Python 3.11 and its standard library: `llmops repo` copies
the file beside each model that runs inside Triton, as `llmops_contract.py`. docs/contract.md
explains the protocol, and its tables are generated from this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

#: Version of the contract. Version 2 introduced messages with several requests on step streams. A
#: gateway and a model work together only if their versions are equal.
CONTRACT_VERSION = 2

#: Suffixes of the names of the Triton models that serve NAME. The ensemble is called NAME.
PREPROCESSING_SUFFIX, ENGINE_SUFFIX, POSTPROCESSING_SUFFIX = "-preprocessing", "-tensorrt_llm", "-postprocessing"
EMBEDDING_SUFFIX, SCORE_SUFFIX = "-embedding", "-score"

#: Name of the string parameter of config.pbtxt that holds the model metadata as JSON.
METADATA_PARAMETER = "llmops_model_metadata"
#: Name of the string parameter of config.pbtxt that holds the runtime of the engine model.
RUNTIME_PARAMETER = "llmops_runtime"
#: Name of the string parameter of config.pbtxt that holds the maximum number of waiting sequences.
QUEUE_SIZE_PARAMETER = "max_queue_size"
#: Triton's own parameters: the first requests an empty final response, the second marks the final
#: response.
EMPTY_FINAL_PARAMETER, FINAL_RESPONSE_PARAMETER = "triton_enable_empty_final_response", "triton_final_response"

#: Text before the colon of an error message. A rejection of an input has the tensor's name there.
DRAINING_PREFIX, ENGINE_DEAD_PREFIX, QUEUE_FULL_PREFIX = "drain", "engine", "queue"
UNKNOWN_SUBSCRIPTION = "subscription: unknown"

#: Transports in the model metadata: one gRPC stream per request, or one step stream per gateway.
REQUEST_TRANSPORT, STEP_TRANSPORT = "request", "step"

#: Bit flags of an entry of a step message: the last entry of its sequence, the last entry of its
#: slot, an error, a cancellation, and the first entry of its slot.
LAST_OF_SEQUENCE, LAST_OF_SLOT, ERROR_FLAG, CANCELLED_FLAG = 1, 2, 4, 8
FIRST_OF_SLOT = 16
#: Kinds of KV cache changes in `step_kv_events`. Each applies to a run of `step_kv_hashes`.
KV_CLEARED, KV_STORED, KV_REMOVED = 0, 1, 2
#: Seconds without other messages after which the engine sends its unchanged state to watchers, as a
#: sign of life.
HEARTBEAT_INTERVAL = 1.0
#: Request id of messages that need no reply. A Triton that unloads the model rejects these
#: messages, and the client ignores the error.
NO_REPLY_ID = "aside"
#: Maximum number of steps that an engine keeps until the gateway acknowledges them. An engine with
#: this many sends nothing more, which bounds its memory for a gateway that does not read.
MAX_UNACKNOWLEDGED_STEPS = 256
#: Seconds that a subscription outlives its stream, in which the gateway tries to reconnect.
RECONNECT_GRACE_PERIOD = 5.0

GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar"]
GUIDE_KINDS: tuple[GuideKind, ...] = get_args(GuideKind)

#: Triton's datatypes by their names in messages.
INT32, INT64, UINT8, UINT64 = "INT32", "INT64", "UINT8", "UINT64"
FP16, FP32, BOOL, BYTES = "FP16", "FP32", "BOOL", "BYTES"


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model.

    Attributes:
        name: The name of the tensor.
        datatype: The datatype by its name in messages, such as INT32.
        meaning: The phrase that describes the tensor in docs/contract.md.
        dims: The dimensions per request, without the batch dimension; -1 for a variable length.
        optional: True if a request may leave out the tensor.
        scalar: True if the backend sees the shape [batch] instead of [batch, 1].
        ragged: True if the lengths differ within a batch.
        taken: True if this project's engine models use the input. The models reject an input
            that is neither taken nor has a neutral value.
        default: The value of an absent input.
        bounds: The smallest and the largest valid value, both included.
        neutral: Values without an effect, which this project's engine models ignore.
        needs: The capability without which any value but `default` is rejected, or an empty text.
    """

    name: str
    datatype: str
    meaning: str
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False
    ragged: bool = False
    taken: bool = False
    default: Any = None
    bounds: tuple[float, float] | None = None
    neutral: tuple[Any, ...] = ()
    needs: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def data_type(self) -> str:
        """Return the datatype by its name in config.pbtxt, such as TYPE_INT32."""
        return "TYPE_STRING" if self.datatype == BYTES else f"TYPE_{self.datatype}"


class TensorList(list[Tensor]):
    """A list of the inputs or the outputs of a model, in the order in which they are declared."""

    def plain(self, name: str, datatype: str, meaning: str, dims: tuple[int, ...] = (1,), **more: Any) -> Tensor:
        """Declare a tensor, and return the tensor. `more` has other fields of `Tensor`."""
        self.append(Tensor(name, datatype, meaning, dims, **more))
        return self[-1]

    def scalar(self, name: str, datatype: str, meaning: str, **more: Any) -> Tensor:
        """Declare a tensor that the backend sees with the shape [batch], and return the tensor."""
        return self.plain(name, datatype, meaning, scalar=True, **more)

    def ragged(self, name: str, datatype: str, dims: tuple[int, ...], meaning: str, **more: Any) -> Tensor:
        """Declare a tensor whose lengths differ within a batch, and return the tensor."""
        return self.plain(name, datatype, meaning, dims, ragged=True, **more)


# NAME-tensorrt_llm: the inputs of TensorRT-LLM's own model (its `inflight_batcher_llm` repository).
ENGINE_INPUTS = TensorList()
_in = ENGINE_INPUTS
INPUT_IDS = _in.ragged("input_ids", INT32, (-1,), "token ids of the prompt", taken=True)
INPUT_LENGTHS = _in.scalar("input_lengths", INT32, "number of tokens in input_ids", optional=False, taken=True)
REQUEST_OUTPUT_LEN = _in.scalar(
    "request_output_len", INT32, "maximum number of new tokens", optional=False, taken=True, default=0
)
_in.ragged("encoder_input_features", FP16, (-1, -1), "for encoder-decoder models")
_in.scalar("encoder_output_lengths", INT32, "for encoder-decoder models")
NUM_RETURN_SEQUENCES = _in.scalar(
    "num_return_sequences", INT32, "independent answers to the prompt", taken=True, default=1
)
_in.ragged("draft_input_ids", INT32, (-1,), "tokens drafted outside of the engine")
_in.ragged("decoder_input_ids", INT32, (-1,), "for encoder-decoder models")
_in.scalar("decoder_input_lengths", INT32, "for encoder-decoder models")
_in.ragged("draft_logits", FP32, (-1, -1), "logits of the drafted tokens")
DRAFT_ACCEPTANCE_THRESHOLD = _in.scalar("draft_acceptance_threshold", FP32, "threshold for keeping drafted tokens")
END_ID = _in.scalar("end_id", INT32, "token that ends the text; -1 for none", taken=True, default=-1)
PAD_ID = _in.scalar("pad_id", INT32, "padding token", taken=True)
STOP_WORDS_LIST = _in.ragged(
    "stop_words_list", INT32, (2, -1), "stop words: ids in row 0, the end of each word in row 1", taken=True
)
BAD_WORDS_LIST = _in.ragged(
    "bad_words_list", INT32, (2, -1), "words that must not appear, in the form of stop_words_list", taken=True
)
EMBEDDING_BIAS = _in.ragged("embedding_bias", FP32, (-1,), "value added to the logit of each token id", taken=True)
BEAM_WIDTH = _in.scalar("beam_width", INT32, "number of beams of beam search", neutral=(1,))
RUNTIME_TOP_K = _in.scalar(
    "runtime_top_k", INT32, "top-k sampling; 1 is greedy, 0 is off", taken=True, default=0, bounds=(0, 2**31 - 1)
)
TEMPERATURE = _in.scalar(
    "temperature", FP32, "sampling temperature; 0 is greedy", taken=True, default=1.0, bounds=(0.0, 100.0)
)
RUNTIME_TOP_P = _in.scalar(
    "runtime_top_p", FP32, "top-p sampling; 0 and 1 are off", taken=True, default=1.0, bounds=(0.0, 1.0)
)
_in.scalar("runtime_top_p_min", FP32, "decay setting of top_p", neutral=(0.0,))
_in.scalar("runtime_top_p_decay", FP32, "decay setting of top_p", neutral=(0.0, 1.0))
_in.scalar("runtime_top_p_reset_ids", INT32, "decay setting of top_p", neutral=(-1,))
_in.scalar("len_penalty", FP32, "for beam search", neutral=(0.0, 1.0))
_in.scalar("early_stopping", BOOL, "for beam search", neutral=(False,))
REPETITION_PENALTY = _in.scalar(
    "repetition_penalty", FP32, "1 is off", taken=True, default=1.0, bounds=(0.0, 100.0), needs="penalties"
)
MIN_TOKENS = _in.scalar("min_tokens", INT32, "minimum number of new tokens", taken=True, default=0)
_in.scalar("beam_search_diversity_rate", FP32, "for beam search", neutral=(0.0,))
PRESENCE_PENALTY = _in.scalar(
    "presence_penalty", FP32, "0 is off", taken=True, default=0.0, bounds=(-100.0, 100.0), needs="penalties"
)
FREQUENCY_PENALTY = _in.scalar(
    "frequency_penalty", FP32, "0 is off", taken=True, default=0.0, bounds=(-100.0, 100.0), needs="penalties"
)
SEED = _in.scalar("seed", UINT64, "random seed; sequence i uses seed + i", taken=True, needs="seed")
RETURN_LOG_PROBS = _in.scalar("return_log_probs", BOOL, "true to return log-probabilities", taken=True, default=False)
RETURN_CONTEXT_LOGITS = _in.scalar(
    "return_context_logits", BOOL, "true to return the logits of the prompt", neutral=(False,)
)
_in.scalar("return_generation_logits", BOOL, "true to return the logits of the answer", neutral=(False,))
_in.scalar("return_perf_metrics", BOOL, "true to return times and cache figures", neutral=(False,))
RETURN_NUM_INPUT_TOKENS = _in.scalar(
    "return_num_input_tokens", BOOL, "true to return num_input_tokens", taken=True, default=False
)
RETURN_NUM_OUTPUT_TOKENS = _in.scalar(
    "return_num_output_tokens", BOOL, "true to return num_output_tokens", taken=True, default=False
)
_in.scalar("exclude_input_in_output", BOOL, "true to leave the prompt out of output_ids", neutral=(True,))
STOP = _in.scalar("stop", BOOL, "true to end the running request with this id", taken=True, default=False)
STREAMING = _in.scalar("streaming", BOOL, "true for a response per step", taken=True, default=False)
_in.ragged("prompt_embedding_table", FP16, (-1, -1), "for prompt tuning")
_in.ragged("prompt_table_extra_ids", UINT64, (-1,), "for prompt tuning")
_in.scalar("prompt_vocab_size", INT32, "for prompt tuning", neutral=(0,))
_in.ragged("cross_attention_mask", BOOL, (-1, -1), "for encoder-decoder models")
_in.plain("mrope_rotary_cos_sin", FP32, "for vision models", (-1,))
_in.plain("mrope_position_deltas", INT64, "for vision models")
LORA_TASK_ID = _in.scalar("lora_task_id", UINT64, "id of the LoRA adapter; 0 for none", taken=True, default=0)
_in.ragged("lora_weights", FP16, (-1, -1), "weights of an adapter")
_in.ragged("lora_config", INT32, (-1, 3), "modules of an adapter")
_in.ragged("context_phase_params", UINT8, (-1,), "state of a separate prefill")
_in.ragged("skip_cross_attn_blocks", BOOL, (1,), "for encoder-decoder models", neutral=(False,))
for _name in ("starts", "ends", "priorities", "durations_ms"):
    _in.ragged(f"retention_token_range_{_name}", INT32, (-1,), "retention of KV-cache blocks")
for _name in ("priority", "duration_ms"):
    _in.ragged(f"retention_decode_{_name}", INT32, (1,), "retention of KV-cache blocks")
GUIDE_TYPE = _in.ragged("guided_decoding_guide_type", BYTES, (1,), " · ".join(GUIDE_KINDS), taken=True)
GUIDE = _in.ragged("guided_decoding_guide", BYTES, (1,), "the grammar that the answer follows", taken=True)
for _name in ("window_size", "ngram_size", "verification_set_size"):
    _in.ragged(f"lookahead_{_name}", INT32, (1,), "for lookahead decoding")

ENGINE_OUTPUTS = TensorList()
_out = ENGINE_OUTPUTS
OUTPUT_IDS = _out.plain("output_ids", INT32, "the new tokens", (-1, -1))
SEQUENCE_LENGTH = _out.plain("sequence_length", INT32, "number of new tokens in output_ids", (-1,))
CUM_LOG_PROBS = _out.plain("cum_log_probs", FP32, "log-probability of the answer so far", (-1,))
OUTPUT_LOG_PROBS = _out.plain("output_log_probs", FP32, "log-probability of each new token", (-1, -1))
_out.plain("context_logits", FP32, "logits of the prompt", (-1, -1))
_out.plain("generation_logits", FP32, "logits of the answer", (-1, -1, -1))
_out.plain("batch_index", INT32, "index of the request in its batch")
SEQUENCE_INDEX = _out.plain("sequence_index", INT32, "index of the sequence, below num_return_sequences")
CONTEXT_PHASE_PARAMS = _out.plain("context_phase_params", UINT8, "state of a separate prefill", (-1,))
for _name in ("alloc_new_blocks", "reused_blocks", "alloc_total_blocks"):
    _out.plain(f"kv_cache_{_name}", INT32, "sent with return_perf_metrics")
for _name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"):
    _out.plain(f"{_name}_ns", INT64, "sent with return_perf_metrics")
_out.plain("acceptance_rate", FP32, "accepted share of drafted tokens")
_out.plain("total_accepted_draft_tokens", INT32, "accepted drafted tokens")
_out.plain("total_draft_tokens", INT32, "drafted tokens")
NUM_INPUT_TOKENS = _out.plain("num_input_tokens", INT32, "number of prompt tokens")
NUM_OUTPUT_TOKENS = _out.plain("num_output_tokens", INT32, "number of new tokens")

# Inputs and outputs that this project's engine models have in addition to NVIDIA's.
EXTENSION_INPUTS = TensorList()
RUNTIME_MIN_P = EXTENSION_INPUTS.scalar(
    "runtime_min_p", FP32, "min-p sampling; 0 is off", taken=True, default=0.0, bounds=(0.0, 1.0), needs="min_p"
)
CALLER = EXTENSION_INPUTS.scalar("caller", BYTES, "name of the caller; `a/b` is user `b` of tenant `a`", taken=True)
RETURN_CONTEXT_IDS = EXTENSION_INPUTS.scalar(
    "return_context_ids", BOOL, "true to return context_ids and finished", taken=True, default=False
)
TOP_LOG_PROBS = EXTENSION_INPUTS.scalar(
    "top_log_probs",
    INT32,
    "number of most likely tokens to return per position, on step streams",
    taken=True,
    default=0,
    bounds=(0, 20),
    needs="top_logprobs",
)
PROMPT_LOG_PROBS = EXTENSION_INPUTS.scalar(
    "prompt_log_probs",
    INT32,
    "number of most likely tokens to return per prompt position, on step streams; -1 for none",
    taken=True,
    default=-1,
    bounds=(-1, 20),
    needs="prompt_logprobs",
)
CACHE_SALT = EXTENSION_INPUTS.scalar(
    "cache_salt",
    UINT64,
    "salt; requests share cached prefixes only with requests of the same salt",
    taken=True,
    default=0,
)
EXTENSION_OUTPUTS = TensorList()
CONTEXT_IDS = EXTENSION_OUTPUTS.plain("context_ids", INT32, "the 32 tokens before the new tokens", (-1, -1))
FINISHED = EXTENSION_OUTPUTS.plain("finished", BOOL, "true if the sequence has ended")

# Step streams: the inputs are messages of a gateway, the outputs are messages of the engine.
STEP_INPUTS = TensorList()
SUBSCRIPTION = STEP_INPUTS.plain("subscription", BYTES, "id of the subscription, chosen by the gateway")
SUBMISSIONS = STEP_INPUTS.plain("submissions", BYTES, "requests, each as a JSON object", (-1,))
SLOT = STEP_INPUTS.plain("slot", INT32, "number of the request, higher than all before")
RESUME_FROM = STEP_INPUTS.plain(
    "resume_from", INT64, "index of the last step received, 0 for a new subscription", default=0
)
ACKNOWLEDGE = STEP_INPUTS.plain("acknowledge", INT64, "index of the last step handled")
DRAIN = STEP_INPUTS.plain("drain", BOOL, "true to reject new requests", default=False)
WATCH_STATE = STEP_INPUTS.plain(
    "watch_state", BOOL, "with subscription: true to receive the engine's state", default=False
)
DEMAND = STEP_INPUTS.plain("demand", INT32, "with acknowledge: tokens and weights that wait in the gateway", (2,))
STEP_OUTPUTS = TensorList()
STEP_INDEX = STEP_OUTPUTS.plain("step_index", INT64, "index of the step: 1, 2, 3 … per subscription")
STEP_ENTRIES = STEP_OUTPUTS.plain("step_entries", INT32, "slot, sequence_index, token count, flags", (-1, 4))
STEP_TOKENS = STEP_OUTPUTS.plain("step_tokens", INT32, "tokens of all entries, in their order", (-1,))
STEP_LOG_PROBS = STEP_OUTPUTS.plain(
    "step_log_probs", FP32, "log-probability of each token of the requests that ask for them", (-1,)
)
STEP_TOP_COUNTS = STEP_OUTPUTS.plain(
    "step_top_counts", INT32, "with `top_log_probs`: number of alternatives for each token of step_tokens", (-1,)
)
STEP_TOP_IDS = STEP_OUTPUTS.plain("step_top_ids", INT32, "token ids of all alternatives, the most likely first", (-1,))
STEP_TOP_LOG_PROBS = STEP_OUTPUTS.plain("step_top_log_probs", FP32, "log-probabilities of step_top_ids", (-1,))
STEP_PROMPT_LENGTHS = STEP_OUTPUTS.plain(
    "step_prompt_lengths",
    INT32,
    "with `prompt_log_probs`, for each slot's first entry: number of prompt positions, whose "
    "alternatives follow those of step_tokens",
    (-1,),
)
STEP_ERRORS = STEP_OUTPUTS.plain("step_errors", BYTES, "message for each entry with the error flag", (-1,))
STEP_CACHED = STEP_OUTPUTS.plain(
    "step_cached", INT32, "for each slot's first entry: cached prompt tokens, or -1", (-1,)
)
STEP_STATE = STEP_OUTPUTS.plain("step_state", INT32, "state of the engine, for watchers", (12,))
STEP_KV_HASHES = STEP_OUTPUTS.plain("step_kv_hashes", INT64, "hashes of KV-cache blocks, for watchers", (-1,))
STEP_KV_EVENTS = STEP_OUTPUTS.plain("step_kv_events", INT32, "kind of each change and its number of hashes", (-1, 2))
STEP_MODEL_IDENTITY = STEP_OUTPUTS.plain(
    "step_model_identity", BYTES, "model, version, engine and instance, for watchers", (4,)
)

# The numbers of `step_state` in their order, each with its description in docs/contract.md.
STATE_FIELDS = {
    "running": "sequences in the batch",
    "waiting": "sequences that wait for a place in the batch",
    "waiting_tokens": "prompt tokens of sequences without a first token",
    "free_blocks": "KV-cache blocks that no running sequence holds",
    "blocks": "KV-cache blocks in total",
    "tokens_per_block": "tokens per KV-cache block",
    "prefill_tokens": "prompt tokens computed in the last step",
    "step_us": "duration of the last step in microseconds",
    "subscribers": "subscribed gateway workers",
    "demand": "sum of the weights in `demand` of all gateway workers",
    "draining": "1 if the engine rejects new requests",
    "next_slot": "requests of this subscription in lower slots are counted here, or have ended",
}

# All inputs and outputs of this project's engine models, for every inference library.
PYTHON_ENGINE_INPUTS = TensorList([*ENGINE_INPUTS, *EXTENSION_INPUTS, *STEP_INPUTS])
PYTHON_ENGINE_OUTPUTS = TensorList([*ENGINE_OUTPUTS, *EXTENSION_OUTPUTS, *STEP_OUTPUTS])

PREPROCESSING_INPUTS = TensorList()
_in = PREPROCESSING_INPUTS
PRE_QUERY = _in.plain("QUERY", BYTES, "the text", optional=False)
PRE_REQUEST_OUTPUT_LEN = _in.plain("REQUEST_OUTPUT_LEN", INT32, "maximum number of new tokens", optional=False)
PRE_BAD_WORDS = _in.plain("BAD_WORDS_DICT", BYTES, "words that must not appear", (-1,))
PRE_STOP_WORDS = _in.plain("STOP_WORDS_DICT", BYTES, "words that end the answer", (-1,))
PRE_BIAS_WORDS = _in.plain("EMBEDDING_BIAS_WORDS", BYTES, "words whose probability changes", (-1,))
PRE_BIAS_WEIGHTS = _in.plain("EMBEDDING_BIAS_WEIGHTS", FP32, "value added to the logits of each word", (-1,))
PRE_END_ID = _in.plain("END_ID", INT32, "token that ends the text instead of the model's")
PRE_PAD_ID = _in.plain("PAD_ID", INT32, "padding token instead of the model's")
PRE_MIN_TOKENS = _in.plain("MIN_TOKENS", INT32, "minimum number of new tokens")

PREPROCESSING_OUTPUTS = TensorList()
_out = PREPROCESSING_OUTPUTS
PRE_OUT_IDS = _out.plain("INPUT_ID", INT32, "input_ids", (-1,))
PRE_OUT_LENGTH = _out.plain("REQUEST_INPUT_LEN", INT32, "input_lengths")
PRE_OUT_BAD_WORDS = _out.plain("BAD_WORDS_IDS", INT32, "bad_words_list", (2, -1))
PRE_OUT_STOP_WORDS = _out.plain("STOP_WORDS_IDS", INT32, "stop_words_list", (2, -1))
PRE_OUT_BIAS = _out.plain("EMBEDDING_BIAS", FP32, "embedding_bias", (-1,))
PRE_OUT_OUTPUT_LEN = _out.plain("REQUEST_OUTPUT_LEN", INT32, "request_output_len", (-1,))
PRE_OUT_END_ID = _out.plain("OUT_END_ID", INT32, "end_id")
PRE_OUT_PAD_ID = _out.plain("OUT_PAD_ID", INT32, "pad_id")
# NVIDIA's engine model has no such input, so only ensembles with this project's engine models have
# the output.
PRE_OUT_RETURN_CONTEXT = Tensor("RETURN_CONTEXT_IDS", BOOL, "return_context_ids")

POSTPROCESSING_INPUTS = TensorList()
_in = POSTPROCESSING_INPUTS
POST_TOKENS = _in.plain("TOKENS_BATCH", INT32, "output_ids", (-1, -1), optional=False)
POST_LENGTH = _in.plain("SEQUENCE_LENGTH", INT32, "sequence_length", (-1,), optional=False)
POST_CONTEXT_IDS = _in.plain("CONTEXT_IDS", INT32, "context_ids", (-1, -1))
POST_FINISHED = _in.plain("FINISHED", BOOL, "finished")
POSTPROCESSING_OUTPUTS = TensorList()
POST_OUTPUT = POSTPROCESSING_OUTPUTS.plain("OUTPUT", BYTES, "the text of the new tokens", (-1,))

# NAME-embedding, the model for embeddings.
EMBEDDING_INPUTS = TensorList()
EMBEDDING_IDS = EMBEDDING_INPUTS.plain("input_ids", INT32, "token ids, padded", (-1,), optional=False, ragged=True)
EMBEDDING_LENGTHS = EMBEDDING_INPUTS.plain("input_lengths", INT32, "number of tokens in each row", optional=False)
EMBEDDING_OUTPUTS = TensorList()
EMBEDDING_VECTOR = EMBEDDING_OUTPUTS.plain("embedding", FP32, "vector of each row", (-1,), optional=False)

# NAME-score, the model for rerankers: each row is a pair of texts.
SCORE_INPUTS = TensorList(EMBEDDING_INPUTS)
SCORE_TYPES = SCORE_INPUTS.plain(
    "token_type_ids",
    INT32,
    "the text that each token belongs to, as the model numbers them",
    (-1,),
    optional=False,
    ragged=True,
)
SCORE_OUTPUTS = TensorList()
SCORE_VALUE = SCORE_OUTPUTS.plain("score", FP32, "score of each row, from 0 to 1", optional=False)

# Tensors of the ensemble NAME. Each table maps a tensor to the tensor of the next model that
# receives it.
TEXT_INPUT, MAX_TOKENS, TOP_K, STREAM, TEXT_OUTPUT = "text_input", "max_tokens", "top_k", "stream", "text_output"
STOP_WORDS, BAD_WORDS, BIAS_WORDS, BIAS_WEIGHTS = (
    "stop_words",
    "bad_words",
    "embedding_bias_words",
    "embedding_bias_weights",
)
ENSEMBLE_TO_PREPROCESSING: dict[str, Tensor] = {
    TEXT_INPUT: PRE_QUERY,
    MAX_TOKENS: PRE_REQUEST_OUTPUT_LEN,
    BAD_WORDS: PRE_BAD_WORDS,
    STOP_WORDS: PRE_STOP_WORDS,
    "end_id": PRE_END_ID,
    "pad_id": PRE_PAD_ID,
    "min_tokens": PRE_MIN_TOKENS,
    BIAS_WORDS: PRE_BIAS_WORDS,
    BIAS_WEIGHTS: PRE_BIAS_WEIGHTS,
}
_RENAMED = {
    "runtime_top_k": TOP_K,
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "streaming": STREAM,
    "prompt_table_extra_ids": "prompt_table_extra_id",
}
_FORWARDED = """num_return_sequences runtime_top_k runtime_top_p temperature len_penalty repetition_penalty min_tokens
presence_penalty frequency_penalty seed return_log_probs return_context_logits return_generation_logits
return_perf_metrics return_num_input_tokens return_num_output_tokens exclude_input_in_output beam_width streaming
prompt_embedding_table prompt_vocab_size prompt_table_extra_ids lora_task_id lora_weights lora_config
guided_decoding_guide_type guided_decoding_guide"""
_named = {tensor.name: tensor for tensor in ENGINE_INPUTS}
ENSEMBLE_TO_ENGINE: dict[str, Tensor] = {_RENAMED.get(name, name): _named[name] for name in _FORWARDED.split()}
# The ensemble's inputs have the datatypes and dimensions of the tensors that they feed. `scalar` is
# false, because Triton applies a `reshape` only where a model receives the tensor.
ENSEMBLE_INPUTS = TensorList(
    replace(fed, name=name, scalar=False, ragged=False)
    for name, fed in {**ENSEMBLE_TO_PREPROCESSING, **ENSEMBLE_TO_ENGINE}.items()
)
PREPROCESSING_TO_ENGINE: dict[Tensor, Tensor] = {
    PRE_OUT_IDS: INPUT_IDS,
    PRE_OUT_LENGTH: INPUT_LENGTHS,
    PRE_OUT_OUTPUT_LEN: REQUEST_OUTPUT_LEN,
    PRE_OUT_BAD_WORDS: BAD_WORDS_LIST,
    PRE_OUT_STOP_WORDS: STOP_WORDS_LIST,
    PRE_OUT_BIAS: EMBEDDING_BIAS,
    PRE_OUT_END_ID: END_ID,
    PRE_OUT_PAD_ID: PAD_ID,
}

# The fields of the model metadata, which NAME-tensorrt_llm announces in its parameter
# `llmops_model_metadata`, each with its description in docs/contract.md.
METADATA_FIELDS = {
    "contract": "version of the contract; a gateway rejects models of other versions",
    "name": "name of the served model",
    "target": "target of the build",
    "tokenizer_dir": "folder with tokenizer.json and the chat template",
    "max_batch_size": "maximum number of concurrent sequences",
    "max_seq_len": "maximum number of prompt and answer tokens together",
    "vocab_size": "number of token ids",
    "bos_id": "token that begins a text, or null",
    "end_ids": "tokens that end a text",
    "pad_id": "padding token, or null",
    "chat_template": "true if the tokenizer has a chat template",
    "sampling": "sampling defaults from generation_config.json",
    "capabilities": "capabilities, listed below",
    "adapters": "LoRA adapters, each with name and id (`lora_task_id`)",
    "transports": "`request`, and `step` for this project's engine models",
    "state": "true if watchers receive the engine's state",
    "kv_events": "true if watchers receive changes of the engine's KV cache",
    "cached_tokens": "true if the engine reports how much of a prompt was cached",
    "batch_invariant": "true if an answer does not depend on other requests in its batch",
    "engine": "digest of all inputs of the engine's build",
    "tokenizer": "digest of tokenizer.json",
    "template": "digest of chat_template.jinja",
    "built": "time of the build in Unix seconds",
}
CAPABILITIES = {
    "logprobs": "return_log_probs",
    "top_logprobs": "largest top_log_probs",
    "prompt_logprobs": "prompt_log_probs",
    "logit_bias": "embedding_bias",
    "n": "largest num_return_sequences",
    "guided": "values of guided_decoding_guide_type",
    "bad_words": "bad_words_list",
    "min_p": "runtime_min_p",
    "callers": "caller",
    "seed": "seed",
    "penalties": "repetition_penalty, presence_penalty, frequency_penalty",
    "lora": "lora_task_id",
    "cache_salt": "cache_salt",
}
