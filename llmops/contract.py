"""Tensors, flags, name suffixes and parameters shared by the gateway and the models inside Triton.

Data only, for Python 3.11 and its standard library: `llmops repo` copies this file beside each
model that runs inside Triton, as `llmops_contract.py`. docs/contract.md explains the protocol, and
takes its tables from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

#: Version of the contract. Since 2 a message of a step stream holds several requests.
CONTRACT_VERSION = 2

#: Suffixes of the Triton models of one served NAME. The ensemble has the name itself.
PREPROCESSING_SUFFIX, ENGINE_SUFFIX, POSTPROCESSING_SUFFIX = "-preprocessing", "-tensorrt_llm", "-postprocessing"
EMBEDDING_SUFFIX, SCORE_SUFFIX = "-embedding", "-score"

#: String parameter of config.pbtxt with the model metadata, as JSON.
METADATA_PARAMETER = "llmops_model_metadata"
#: String parameter of config.pbtxt with the runtime of the engine model.
RUNTIME_PARAMETER = "llmops_runtime"
#: String parameter of config.pbtxt with the number of sequences that may wait.
QUEUE_SIZE_PARAMETER = "max_queue_size"
#: Triton's own parameters of a request and of a response.
EMPTY_FINAL_PARAMETER, FINAL_RESPONSE_PARAMETER = "triton_enable_empty_final_response", "triton_final_response"

#: Prefixes of errors before their colon. A rejected request has the tensor's name there.
DRAINING_PREFIX, ENGINE_DEAD_PREFIX, QUEUE_FULL_PREFIX = "drain", "engine", "queue"
UNKNOWN_SUBSCRIPTION = "subscription: unknown"

#: Transports to the engine in the model metadata: a stream per request, or a stream per gateway.
REQUEST_TRANSPORT, STEP_TRANSPORT = "request", "step"

#: Flags of an entry of a step message.
LAST_OF_SEQUENCE, LAST_OF_SLOT, ERROR_FLAG, CANCELLED_FLAG = 1, 2, 4, 8
FIRST_OF_SLOT = 16
#: Kinds of changes in `step_kv_events`, each for a run of `step_kv_hashes`.
KV_CLEARED, KV_STORED, KV_REMOVED = 0, 1, 2
#: Seconds after which a watched engine without other messages sends its state alone.
HEARTBEAT_INTERVAL = 1.0
#: Request id of messages that need no reply. An unloading Triton rejects them, and the client
#: ignores the error.
NO_REPLY_ID = "aside"
#: Steps that an engine keeps until they are acknowledged, which bounds the steps in flight.
MAX_UNACKNOWLEDGED_STEPS = 256
#: Seconds that a subscription outlives its stream, and for which a gateway tries to reconnect.
RECONNECT_GRACE_PERIOD = 5.0

GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar"]
GUIDE_KINDS: tuple[GuideKind, ...] = get_args(GuideKind)

#: Triton's datatypes, by their names in messages.
INT32, INT64, UINT8, UINT64 = "INT32", "INT64", "UINT8", "UINT64"
FP16, FP32, BOOL, BYTES = "FP16", "FP32", "BOOL", "BYTES"


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model.

    Attributes:
        dims: The dimensions per request, without the batch dimension.
        scalar: The backend sees [batch] instead of [batch, 1].
        ragged: Lengths differ within a batch.
        taken: Our engine models accept the input. They reject inputs that are neither taken nor
            neutral.
        default: The value of an absent input.
        bounds: The smallest and the largest value.
        neutral: Values without an effect, which our engine models ignore.
        needs: The capability without which any value but `default` is rejected.
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
        """The datatype by its name in config.pbtxt."""
        return "TYPE_STRING" if self.datatype == BYTES else f"TYPE_{self.datatype}"


class TensorList(list[Tensor]):
    """Inputs or outputs of a model, in the order in which they are declared."""

    def plain(self, name: str, datatype: str, meaning: str, dims: tuple[int, ...] = (1,), **more: Any) -> Tensor:
        """Declare a tensor and return it."""
        self.append(Tensor(name, datatype, meaning, dims, **more))
        return self[-1]

    def scalar(self, name: str, datatype: str, meaning: str, **more: Any) -> Tensor:
        """Declare a tensor that the backend sees as [batch]."""
        return self.plain(name, datatype, meaning, scalar=True, **more)

    def ragged(self, name: str, datatype: str, dims: tuple[int, ...], meaning: str, **more: Any) -> Tensor:
        """Declare a tensor whose lengths differ within a batch."""
        return self.plain(name, datatype, meaning, dims, ragged=True, **more)


# NAME-tensorrt_llm: the inputs of TensorRT-LLM's own model (its `inflight_batcher_llm` repository).
ENGINE_INPUTS = TensorList()
_in = ENGINE_INPUTS
INPUT_IDS = _in.ragged("input_ids", INT32, (-1,), "token ids of the prompt", taken=True)
INPUT_LENGTHS = _in.scalar("input_lengths", INT32, "how many of them count", optional=False, taken=True)
REQUEST_OUTPUT_LEN = _in.scalar(
    "request_output_len", INT32, "the most new tokens", optional=False, taken=True, default=0
)
_in.ragged("encoder_input_features", FP16, (-1, -1), "of an encoder-decoder model")
_in.scalar("encoder_output_lengths", INT32, "of an encoder-decoder model")
NUM_RETURN_SEQUENCES = _in.scalar(
    "num_return_sequences", INT32, "independent answers to the prompt", taken=True, default=1
)
_in.ragged("draft_input_ids", INT32, (-1,), "tokens drafted outside")
_in.ragged("decoder_input_ids", INT32, (-1,), "of an encoder-decoder model")
_in.scalar("decoder_input_lengths", INT32, "of an encoder-decoder model")
_in.ragged("draft_logits", FP32, (-1, -1), "logits of the drafted tokens")
DRAFT_ACCEPTANCE_THRESHOLD = _in.scalar("draft_acceptance_threshold", FP32, "which drafted tokens are kept")
END_ID = _in.scalar("end_id", INT32, "token that ends the text; -1 ignores its end", taken=True, default=-1)
PAD_ID = _in.scalar("pad_id", INT32, "padding token", taken=True)
STOP_WORDS_LIST = _in.ragged("stop_words_list", INT32, (2, -1), "row 0 the ids, row 1 where each word ends", taken=True)
BAD_WORDS_LIST = _in.ragged(
    "bad_words_list", INT32, (2, -1), "words that must not appear, in the same form", taken=True
)
EMBEDDING_BIAS = _in.ragged("embedding_bias", FP32, (-1,), "added to the logits, one per token", taken=True)
BEAM_WIDTH = _in.scalar("beam_width", INT32, "beam search", neutral=(1,))
RUNTIME_TOP_K = _in.scalar("runtime_top_k", INT32, "1 is greedy, 0 off", taken=True, default=0, bounds=(0, 2**31 - 1))
TEMPERATURE = _in.scalar("temperature", FP32, "0 is greedy", taken=True, default=1.0, bounds=(0.0, 100.0))
RUNTIME_TOP_P = _in.scalar("runtime_top_p", FP32, "0 and 1 are off", taken=True, default=1.0, bounds=(0.0, 1.0))
_in.scalar("runtime_top_p_min", FP32, "of a decaying top_p", neutral=(0.0,))
_in.scalar("runtime_top_p_decay", FP32, "of a decaying top_p", neutral=(0.0, 1.0))
_in.scalar("runtime_top_p_reset_ids", INT32, "of a decaying top_p", neutral=(-1,))
_in.scalar("len_penalty", FP32, "of beam search", neutral=(0.0, 1.0))
_in.scalar("early_stopping", BOOL, "of beam search", neutral=(False,))
REPETITION_PENALTY = _in.scalar(
    "repetition_penalty", FP32, "1 is off", taken=True, default=1.0, bounds=(0.0, 100.0), needs="penalties"
)
MIN_TOKENS = _in.scalar("min_tokens", INT32, "no end before so many tokens", taken=True, default=0)
_in.scalar("beam_search_diversity_rate", FP32, "of beam search", neutral=(0.0,))
PRESENCE_PENALTY = _in.scalar(
    "presence_penalty", FP32, "0 is off", taken=True, default=0.0, bounds=(-100.0, 100.0), needs="penalties"
)
FREQUENCY_PENALTY = _in.scalar(
    "frequency_penalty", FP32, "0 is off", taken=True, default=0.0, bounds=(-100.0, 100.0), needs="penalties"
)
SEED = _in.scalar("seed", UINT64, "sequence i draws with seed + i", taken=True, needs="seed")
RETURN_LOG_PROBS = _in.scalar("return_log_probs", BOOL, "log-probabilities too", taken=True, default=False)
RETURN_CONTEXT_LOGITS = _in.scalar("return_context_logits", BOOL, "logits of the prompt", neutral=(False,))
_in.scalar("return_generation_logits", BOOL, "logits of the answer", neutral=(False,))
_in.scalar("return_perf_metrics", BOOL, "times and cache figures", neutral=(False,))
RETURN_NUM_INPUT_TOKENS = _in.scalar("return_num_input_tokens", BOOL, "count the prompt", taken=True, default=False)
RETURN_NUM_OUTPUT_TOKENS = _in.scalar("return_num_output_tokens", BOOL, "count the answer", taken=True, default=False)
_in.scalar("exclude_input_in_output", BOOL, "do not echo the prompt", neutral=(True,))
STOP = _in.scalar("stop", BOOL, "end the request of this id", taken=True, default=False)
STREAMING = _in.scalar("streaming", BOOL, "a response per step", taken=True, default=False)
_in.ragged("prompt_embedding_table", FP16, (-1, -1), "of prompt tuning")
_in.ragged("prompt_table_extra_ids", UINT64, (-1,), "of prompt tuning")
_in.scalar("prompt_vocab_size", INT32, "of prompt tuning", neutral=(0,))
_in.ragged("cross_attention_mask", BOOL, (-1, -1), "of an encoder-decoder model")
_in.plain("mrope_rotary_cos_sin", FP32, "of a vision model", (-1,))
_in.plain("mrope_position_deltas", INT64, "of a vision model")
LORA_TASK_ID = _in.scalar("lora_task_id", UINT64, "the adapter; 0 is none", taken=True, default=0)
_in.ragged("lora_weights", FP16, (-1, -1), "weights of an adapter")
_in.ragged("lora_config", INT32, (-1, 3), "modules of an adapter")
_in.ragged("context_phase_params", UINT8, (-1,), "state of a separate prefill")
_in.ragged("skip_cross_attn_blocks", BOOL, (1,), "of an encoder-decoder model", neutral=(False,))
for _name in ("starts", "ends", "priorities", "durations_ms"):
    _in.ragged(f"retention_token_range_{_name}", INT32, (-1,), "what the KV cache keeps")
for _name in ("priority", "duration_ms"):
    _in.ragged(f"retention_decode_{_name}", INT32, (1,), "what the KV cache keeps")
GUIDE_TYPE = _in.ragged("guided_decoding_guide_type", BYTES, (1,), " · ".join(GUIDE_KINDS), taken=True)
GUIDE = _in.ragged("guided_decoding_guide", BYTES, (1,), "the grammar that the answer follows", taken=True)
for _name in ("window_size", "ngram_size", "verification_set_size"):
    _in.ragged(f"lookahead_{_name}", INT32, (1,), "of lookahead decoding")

ENGINE_OUTPUTS = TensorList()
_out = ENGINE_OUTPUTS
OUTPUT_IDS = _out.plain("output_ids", INT32, "the new tokens", (-1, -1))
SEQUENCE_LENGTH = _out.plain("sequence_length", INT32, "how many of them count", (-1,))
CUM_LOG_PROBS = _out.plain("cum_log_probs", FP32, "log-probability of the answer so far", (-1,))
OUTPUT_LOG_PROBS = _out.plain("output_log_probs", FP32, "one for each new token", (-1, -1))
_out.plain("context_logits", FP32, "logits of the prompt", (-1, -1))
_out.plain("generation_logits", FP32, "logits of the answer", (-1, -1, -1))
_out.plain("batch_index", INT32, "the request's place in its batch")
SEQUENCE_INDEX = _out.plain("sequence_index", INT32, "which of num_return_sequences")
CONTEXT_PHASE_PARAMS = _out.plain("context_phase_params", UINT8, "state of a separate prefill", (-1,))
for _name in ("alloc_new_blocks", "reused_blocks", "alloc_total_blocks"):
    _out.plain(f"kv_cache_{_name}", INT32, "with return_perf_metrics")
for _name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"):
    _out.plain(f"{_name}_ns", INT64, "with return_perf_metrics")
_out.plain("acceptance_rate", FP32, "of drafted tokens")
_out.plain("total_accepted_draft_tokens", INT32, "of drafted tokens")
_out.plain("total_draft_tokens", INT32, "of drafted tokens")
NUM_INPUT_TOKENS = _out.plain("num_input_tokens", INT32, "with return_num_input_tokens")
NUM_OUTPUT_TOKENS = _out.plain("num_output_tokens", INT32, "with return_num_output_tokens")

# Inputs and outputs that our own engine models have in addition to NVIDIA's.
EXTENSION_INPUTS = TensorList()
RUNTIME_MIN_P = EXTENSION_INPUTS.scalar(
    "runtime_min_p", FP32, "0 is off", taken=True, default=0.0, bounds=(0.0, 1.0), needs="min_p"
)
CALLER = EXTENSION_INPUTS.scalar("caller", BYTES, "the caller; `a/b` is caller `b` of `a`", taken=True)
RETURN_CONTEXT_IDS = EXTENSION_INPUTS.scalar(
    "return_context_ids", BOOL, "context_ids and finished too", taken=True, default=False
)
TOP_LOG_PROBS = EXTENSION_INPUTS.scalar(
    "top_log_probs",
    INT32,
    "the most likely tokens at each position, on step streams",
    taken=True,
    default=0,
    bounds=(0, 20),
    needs="top_logprobs",
)
PROMPT_LOG_PROBS = EXTENSION_INPUTS.scalar(
    "prompt_log_probs",
    INT32,
    "the most likely tokens at each position of the prompt, on step streams; -1 is none",
    taken=True,
    default=-1,
    bounds=(-1, 20),
    needs="prompt_logprobs",
)
CACHE_SALT = EXTENSION_INPUTS.scalar(
    "cache_salt", UINT64, "cached prefixes are shared only between requests with the same one", taken=True, default=0
)
EXTENSION_OUTPUTS = TensorList()
CONTEXT_IDS = EXTENSION_OUTPUTS.plain("context_ids", INT32, "the 32 tokens before the new ones", (-1, -1))
FINISHED = EXTENSION_OUTPUTS.plain("finished", BOOL, "nothing follows in this sequence")

# Step streams: the messages of a gateway, and those of the engine.
STEP_INPUTS = TensorList()
SUBSCRIPTION = STEP_INPUTS.plain("subscription", BYTES, "its id, chosen by the gateway")
SUBMISSIONS = STEP_INPUTS.plain("submissions", BYTES, "requests, a JSON object each", (-1,))
SLOT = STEP_INPUTS.plain("slot", INT32, "the request's number, which only grows")
RESUME_FROM = STEP_INPUTS.plain("resume_from", INT64, "the last step seen, 0 at first", default=0)
ACKNOWLEDGE = STEP_INPUTS.plain("acknowledge", INT64, "the last step handled")
DRAIN = STEP_INPUTS.plain("drain", BOOL, "take no new requests", default=False)
WATCH_STATE = STEP_INPUTS.plain("watch_state", BOOL, "with subscribe: report the engine's state too", default=False)
DEMAND = STEP_INPUTS.plain("demand", INT32, "with acknowledge: tokens and weights that wait in this gateway", (2,))
STEP_OUTPUTS = TensorList()
STEP_INDEX = STEP_OUTPUTS.plain("step_index", INT64, "1, 2, 3 … per subscription")
STEP_ENTRIES = STEP_OUTPUTS.plain("step_entries", INT32, "slot, sequence_index, token count, flags", (-1, 4))
STEP_TOKENS = STEP_OUTPUTS.plain("step_tokens", INT32, "of all entries, in their order", (-1,))
STEP_LOG_PROBS = STEP_OUTPUTS.plain("step_log_probs", FP32, "one per token, where an entry asks for them", (-1,))
STEP_TOP_COUNTS = STEP_OUTPUTS.plain(
    "step_top_counts", INT32, "with `top_log_probs`: alternatives of each of step_tokens", (-1,)
)
STEP_TOP_IDS = STEP_OUTPUTS.plain("step_top_ids", INT32, "token ids of all alternatives, likeliest first", (-1,))
STEP_TOP_LOG_PROBS = STEP_OUTPUTS.plain("step_top_log_probs", FP32, "their log-probabilities", (-1,))
STEP_PROMPT_LENGTHS = STEP_OUTPUTS.plain(
    "step_prompt_lengths",
    INT32,
    "with `prompt_log_probs`: one per slot's first entry; so many more alternatives follow those of step_tokens",
    (-1,),
)
STEP_ERRORS = STEP_OUTPUTS.plain("step_errors", BYTES, "one per entry with the error flag", (-1,))
STEP_CACHED = STEP_OUTPUTS.plain("step_cached", INT32, "one per slot's first entry: prompt tokens reused, or -1", (-1,))
STEP_STATE = STEP_OUTPUTS.plain("step_state", INT32, "of the engine, to watchers", (12,))
STEP_KV_HASHES = STEP_OUTPUTS.plain("step_kv_hashes", INT64, "names of KV-cache blocks, to watchers", (-1,))
STEP_KV_EVENTS = STEP_OUTPUTS.plain("step_kv_events", INT32, "kind of change and how many names of it", (-1, 2))
STEP_MODEL_IDENTITY = STEP_OUTPUTS.plain(
    "step_model_identity", BYTES, "to watchers: model, version, engine, instance", (4,)
)

# The numbers of `step_state`.
STATE_FIELDS = {
    "running": "sequences in the batch",
    "waiting": "sequences that wait for the batch",
    "waiting_tokens": "tokens of prompts without a first token yet",
    "free_blocks": "KV-cache blocks that no running sequence holds",
    "blocks": "KV-cache blocks",
    "tokens_per_block": "tokens in each",
    "prefill_tokens": "prompt tokens that the last step computed",
    "step_us": "microseconds of the last step",
    "subscribers": "subscribed gateway workers",
    "demand": "sum of the weights that they declared",
    "draining": "1 if the engine takes no new requests",
    "next_slot": "requests of this subscription in lower slots are counted here, or have ended",
}

# All inputs and outputs of our own engine models, whatever the library.
PYTHON_ENGINE_INPUTS = TensorList([*ENGINE_INPUTS, *EXTENSION_INPUTS, *STEP_INPUTS])
PYTHON_ENGINE_OUTPUTS = TensorList([*ENGINE_OUTPUTS, *EXTENSION_OUTPUTS, *STEP_OUTPUTS])

PREPROCESSING_INPUTS = TensorList()
_in = PREPROCESSING_INPUTS
PRE_QUERY = _in.plain("QUERY", BYTES, "the text", optional=False)
PRE_REQUEST_OUTPUT_LEN = _in.plain("REQUEST_OUTPUT_LEN", INT32, "the most new tokens", optional=False)
PRE_BAD_WORDS = _in.plain("BAD_WORDS_DICT", BYTES, "words that must not appear", (-1,))
PRE_STOP_WORDS = _in.plain("STOP_WORDS_DICT", BYTES, "words that end the answer", (-1,))
PRE_BIAS_WORDS = _in.plain("EMBEDDING_BIAS_WORDS", BYTES, "words to favour", (-1,))
PRE_BIAS_WEIGHTS = _in.plain("EMBEDDING_BIAS_WEIGHTS", FP32, "by how much, one per word", (-1,))
PRE_END_ID = _in.plain("END_ID", INT32, "in place of the model's own")
PRE_PAD_ID = _in.plain("PAD_ID", INT32, "in place of the model's own")
PRE_MIN_TOKENS = _in.plain("MIN_TOKENS", INT32, "no end before so many tokens")

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
# only in front of our own engine models
PRE_OUT_RETURN_CONTEXT = Tensor("RETURN_CONTEXT_IDS", BOOL, "return_context_ids")

POSTPROCESSING_INPUTS = TensorList()
_in = POSTPROCESSING_INPUTS
POST_TOKENS = _in.plain("TOKENS_BATCH", INT32, "output_ids", (-1, -1), optional=False)
POST_LENGTH = _in.plain("SEQUENCE_LENGTH", INT32, "sequence_length", (-1,), optional=False)
POST_CONTEXT_IDS = _in.plain("CONTEXT_IDS", INT32, "context_ids", (-1, -1))
POST_FINISHED = _in.plain("FINISHED", BOOL, "finished")
POSTPROCESSING_OUTPUTS = TensorList()
POST_OUTPUT = POSTPROCESSING_OUTPUTS.plain("OUTPUT", BYTES, "the text of the new tokens", (-1,))

# NAME-embedding
EMBEDDING_INPUTS = TensorList()
EMBEDDING_IDS = EMBEDDING_INPUTS.plain("input_ids", INT32, "token ids, padded", (-1,), optional=False, ragged=True)
EMBEDDING_LENGTHS = EMBEDDING_INPUTS.plain("input_lengths", INT32, "how many of a row count", optional=False)
EMBEDDING_OUTPUTS = TensorList()
EMBEDDING_VECTOR = EMBEDDING_OUTPUTS.plain("embedding", FP32, "one vector per row", (-1,), optional=False)

# NAME-score: a row is two texts together
SCORE_INPUTS = TensorList(EMBEDDING_INPUTS)
SCORE_TYPES = SCORE_INPUTS.plain(
    "token_type_ids",
    INT32,
    "which text an id belongs to, as the model counts",
    (-1,),
    optional=False,
    ragged=True,
)
SCORE_OUTPUTS = TensorList()
SCORE_VALUE = SCORE_OUTPUTS.plain("score", FP32, "from 0 to 1, one per row", optional=False)

# NAME, the ensemble: its own names, and what each feeds.
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
# public names with the type of the tensor that they feed; Triton applies a `reshape` at the step
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
# `llmops_model_metadata`.
METADATA_FIELDS = {
    "contract": "version of the contract; a gateway refuses models of another version",
    "name": "name of the served model",
    "target": "target of the build",
    "tokenizer_dir": "folder with tokenizer.json and chat template",
    "max_batch_size": "sequences that run at once",
    "max_seq_len": "tokens of prompt and answer together",
    "vocab_size": "number of token ids",
    "bos_id": "token that begins a text, or null",
    "end_ids": "tokens that end a text",
    "pad_id": "padding token, or null",
    "chat_template": "true if the tokenizer has a chat template",
    "sampling": "defaults from generation_config.json",
    "capabilities": "below",
    "adapters": "LoRA adapters, each with name and id (`lora_task_id`)",
    "transports": "`request`, and `step` for our engine models",
    "state": "true if watchers receive the engine's state",
    "kv_events": "true if watchers receive the changes of its KV cache",
    "cached_tokens": "true if the engine reports how much of a prompt was cached",
    "batch_invariant": "true if an answer does not depend on the rest of its batch",
    "engine": "digest of all inputs of the engine's build",
    "tokenizer": "digest of tokenizer.json",
    "template": "digest of chat_template.jinja",
    "built": "Unix seconds",
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
