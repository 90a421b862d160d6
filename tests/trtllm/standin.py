"""A stand-in for `tensorrt_llm`, as strict as 1.2.1 or as 1.3, and nothing kinder.

docs/tensorrt-llm-calls.md is its specification: each call that llmops makes, with upstream's file.
What does not exist there, or does nothing, fails here. `VERSION` beside this file, or
`api(version)`, chooses the release. It generates prompt[-1]+1, +2, … so that expected tokens can be
written down; with an adapter +2, +4, …; a token of 666 fails the request and 510 kills the engine.
Where upstream would draw, a temperature above 1.5 moves each token by 0 to 4.

Facts, read on 2026-11-22 and 2026-11-23. 1.2.1: NVIDIA/TensorRT-LLM branch gh-pages
`1.2.1/_modules/tensorrt_llm/` (`sampling_params`, `executor/result`, `llmapi/llm`,
`llmapi/llm_args`). 1.3: the tree after 1.3.0rc29. The proxy's reads (`executor/proxy.py`,
`executor/rpc_worker_mixin.py`) are alike in the stored versions of both.
"""

import asyncio
import enum
import os
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pydantic

_FILE = Path(__file__).with_name("VERSION")
__version__ = _FILE.read_text().strip() if _FILE.is_file() else "1.2.1"


class XgrammarGrammar:
    """xgrammar's `Grammar`, which raises RuntimeError for a text that it cannot read."""

    @staticmethod
    def from_ebnf(text: str) -> None:
        if "::=" not in text:
            raise RuntimeError("EBNF parser error: expected ::=\nat 1")

    from_regex = from_json_schema = from_ebnf


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(kw_only=True)
class SamplingParams:
    """The fields that llmops sets: any other fails here."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True


@dataclass(slots=True)
class LoRARequest:
    """tensorrt_llm/executor/request.py."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_path is not None and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
        if self.lora_ckpt_source not in ["hf", "nemo"]:
            raise ValueError("lora_ckpt_source must be 'hf' or 'nemo'")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None = None
    stop_reason: Any = None
    prompt_logprobs: list[dict[int, Logprob]] | None = None


class RequestOutput:
    """Cumulative outputs; iterated on the loop that was running when it was made, as the real one."""

    def __init__(self, llm: "LLM", prompt: list[int], params: SamplingParams, lora_request: LoRARequest | None) -> None:
        self.llm = llm
        self.step = 2 if lora_request is not None else 1
        self.loop = asyncio.get_running_loop()
        self.prompt_token_ids, self.params = prompt, params
        self.greedy = llm.takes_the_most_likely(params)
        self._draw = random.Random(params.seed)
        self.outputs = [CompletionOutput(0, [], [], prompt_logprobs=self._prompt_places(params.prompt_logprobs))]
        self.cached_tokens = 0
        self.finished = self.aborted_ = False

    def abort(self) -> None:
        self.aborted_ = True

    def aborted(self) -> bool:
        return self.aborted_

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        assert asyncio.get_running_loop() is self.loop
        completion = self.outputs[0]
        if self.finished or self.aborted_:
            raise StopAsyncIteration
        await asyncio.sleep(0.002)
        if self.llm.has_shut_down:
            await asyncio.Event().wait()
        token = self.prompt_token_ids[-1] + self.step * (len(completion.token_ids) + 1)
        if not self.greedy and (self.params.temperature or 1.0) > 1.5:
            token += self._draw.randrange(5)
        token = self._biased(token)
        if token == 666:
            raise RuntimeError(self.llm.step_error)
        if token == 510 or self.llm.dead:
            self.llm.dead = True
            raise EngineDeadError("worker 0 exited") if self.llm.later else RuntimeError("LLM is shutting down")
        completion.token_ids.append(token)
        self._log_prob(completion, token)
        self._end(completion, token)
        if self.llm.shutting_down:
            completion.finish_reason = "cancelled"
        self.finished = completion.finish_reason is not None
        self.llm.iterate()
        return self

    def _prompt_places(self, wanted: int | None) -> list[dict[int, Logprob]] | None:
        """One entry follows each prompt token, for as far as it is not cached.

        `_torch/pyexecutor/handle_logits.py` warns about the rest (stored). 1.2.1: 0 is none, and the
        prompt's own token is there only if it is among the likeliest (executor/result.py,
        `compute_logprobs`). 1.3 has it always (#11235).
        """
        later = self.llm.later
        if wanted is None or (wanted == 0 and not later):
            return None
        assert self.llm.arguments.speculative_config is None, "its model returns no logits of the prompt"
        prompt, places = self.prompt_token_ids, []
        for at, token in enumerate(prompt[self.llm.cached :], self.llm.cached):
            place = {token + rank: Logprob(-rank / 10, rank) for rank in range(1, wanted + 1)}
            own = prompt[at + 1] if at + 1 < len(prompt) else token + 1
            places.append({**place, own: place.get(own, Logprob(-5.0, 99))} if later else place)
        return places

    def _biased(self, token: int) -> int:
        """Return the most likely token when the bias is added to logits of 1 for `token` and 0 elsewhere."""
        bias = self.params.embedding_bias
        if bias is None:
            return token
        most = int(bias.argmax())
        return most if bias[most] > (bias[token] if token < len(bias) else 0) + 1 else token

    def _log_prob(self, completion: CompletionOutput, token: int) -> None:
        """1.2.1: 0 means none, else the most likely, of which an odd token is not one. 1.3: 0 means
        the sampled one.
        """
        wanted = self.params.logprobs
        if wanted is None or (wanted == 0 and not self.llm.later):
            return
        if wanted <= 1:
            missed = not self.llm.later and token % 2 and self.llm.sampler != "TRTLLMSampler"
            completion.logprobs.append({token + 1 if missed else token: Logprob(-token / 100)})
            return
        # alternatives: TRTLLMSampler has none, and 1.3 adds the sampled one to them
        assert self.llm.later or self.llm.sampler != "TRTLLMSampler", "logprobs > 1 would be ignored"
        found = {token + at: Logprob(-(token + at) / 100, at + 1) for at in range(1, wanted + 1)}
        completion.logprobs.append({token: Logprob(-token / 100 - 90), **found} if self.llm.later else found)

    def _end(self, completion: CompletionOutput, token: int) -> None:
        """A stop word is cut off unless it is asked for; the end of text stays.

        The minimum-length penalty masks `end_id` and nothing else
        (cpp/tensorrt_llm/kernels/penaltyKernels.cu, `logits[endIds[batchSlot]] = MASK_VAL`): stop
        words end a sequence at any length.
        """
        params = self.params
        enough = len(completion.token_ids) >= (params.min_tokens or 0)
        if enough and not params.ignore_eos and token == params.end_id:
            completion.finish_reason = "stop"
        elif token in (params.stop_token_ids or []):
            completion.finish_reason = "stop"
            if not params.include_stop_str_in_output:
                del completion.token_ids[-1:], completion.logprobs[len(completion.token_ids) :]
        elif len(completion.token_ids) >= params.max_tokens:
            completion.finish_reason = "length"


class EngineDeadError(RuntimeError):
    """1.3: its workers are gone."""


class RequestError(RuntimeError):
    """1.2.1 executor/utils.py; raised by llmapi/llm.py, `_check_arguments`, and for errors of one request."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class KvCacheConfig(_Strict):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = pydantic.Field(0.9, ge=0, le=1)
    host_cache_size: int | None = None
    max_attention_window: list[int] | None = None
    dtype: str = "auto"
    tokens_per_block: int = 32
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    onboard_blocks: bool = True
    event_buffer_max_size: int = 0


class KvCacheConfig13(KvCacheConfig):
    onboard_blocks: ClassVar[None] = None
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    max_util_for_resume: float = 0.95


#: 1.2.1 quantization/mode.py, as far as target pytorch has checkpoints.
_ALGORITHMS = "FP8 FP8_PER_CHANNEL_PER_TOKEN FP8_BLOCK_SCALES W4A16_AWQ W4A8_AWQ W8A16 W4A16_MXFP4"
QuantAlgo = enum.Enum("QuantAlgo", {one: one for one in _ALGORITHMS.split()})


class QuantConfig(_Strict):
    """1.2.1 models/modeling_utils.py."""

    quant_algo: QuantAlgo | None = None
    kv_cache_quant_algo: QuantAlgo | None = None
    group_size: int | None = 128
    exclude_modules: list[str] | None = None


class SchedulerConfig(_Strict):
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None


class CudaGraphConfig(_Strict):
    """1.3; both sizes must agree (`CudaGraphConfig`, "max_batch_size must equal max(batch_sizes)")."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False

    @pydantic.model_validator(mode="after")
    def _agree(self) -> "CudaGraphConfig":
        if self.batch_sizes and self.max_batch_size and self._disagree(self.batch_sizes):
            raise ValueError(
                "Please don't set both cuda_graph_config.batch_sizes and cuda_graph_config.max_batch_size."
            )
        return self

    def _disagree(self, sizes: list[int]) -> bool:
        return self.max_batch_size != max(sizes)


class CudaGraphConfig12(CudaGraphConfig):
    """1.2.1 llmapi/llm_args.py, `TorchLlmArgs.validate_cuda_graph_config`: both only if the sizes are
    its own list, which ours never are.
    """

    def _disagree(self, sizes: list[int]) -> bool:
        return True


class MoeConfig(_Strict):
    """1.2.1 llmapi/llm_args.py: no AUTO."""

    backend: Literal["CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "CUTLASS"
    use_low_precision_moe_combine: bool = False


class LoraConfig(_Strict):
    lora_dir: list[str] = []
    lora_ckpt_source: Literal["hf", "nemo"] = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = []
    trtllm_modules_to_hf_modules: dict[str, str] = {}
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj_lora_b_weight: bool = True


class DecodingBaseConfig(_Strict):
    """The fields that llmops or a test sets; upstream has more."""

    max_draft_len: int | None = None
    speculative_model: str | None = pydantic.Field(
        None, validation_alias=pydantic.AliasChoices("speculative_model", "speculative_model_dir")
    )
    acceptance_window: int | None = None
    acceptance_length_threshold: float | None = None
    allow_advanced_sampling: bool = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "DecodingBaseConfig":
        """1.2.1: the only way from a dict, and exact to the letter."""
        kind = data.get("decoding_type")
        if kind not in _DECODING:
            raise ValueError(f"Invalid decoding type: {kind}")
        return _DECODING[kind](**{name: value for name, value in data.items() if name != "decoding_type"})


class NGramDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "NGram"
    max_matching_ngram_size: int = 0


class MTPDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "MTP"
    num_nextn_predict_layers: int = 1
    mtp_eagle_one_model: bool = True


class EagleDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "Eagle"
    eagle3_one_model: bool | None = True

    @pydantic.model_validator(mode="after")
    def _needs(self) -> "EagleDecodingConfig":
        if self.max_draft_len is None:
            raise ValueError("max_draft_len is required for Eagle")
        return self


class DraftTargetDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "Draft_Target"


class AutoDecodingConfig(DecodingBaseConfig):
    decoding_type: ClassVar[str] = "AUTO"


_DECODING: dict[str, Any] = {
    "MTP": MTPDecodingConfig, "Eagle": EagleDecodingConfig, "NGram": NGramDecodingConfig,
    "DraftTarget": DraftTargetDecodingConfig, "AUTO": AutoDecodingConfig,
}  # fmt: skip


class Speculation13(_Strict):
    """1.3's union in one: what it takes depends on decoding_type less than here."""

    decoding_type: Literal[
        "AUTO", "DFlash", "DSpark", "Draft_Target", "Eagle3", "Eagle", "MTP", "NGram", "PARD", "SA", "SaveState",
        "User_Provided",
    ]  # fmt: skip
    max_draft_len: int | None = None
    speculative_model: str | None = None
    acceptance_rate_window_size: int | None = None
    acceptance_rate_threshold: float | None = None
    enable_penalty: bool = False
    max_matching_ngram_size: int = 2
    num_nextn_predict_layers: int | None = None
    eagle3_one_model: bool | None = True


_COMMON = """model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code revision tokenizer_revision dtype
tensor_parallel_size pipeline_parallel_size context_parallel_size gpus_per_node moe_tensor_parallel_size
moe_expert_parallel_size moe_cluster_parallel_size enable_attention_dp attention_dp_config enable_lm_head_tp_in_adp
cp_config load_format enable_lora peft_cache_config enable_chunked_prefill guided_decoding_backend
cache_transceiver_config sparse_attention_config max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens
gather_generation_logits num_postprocess_workers postprocess_tokenizer_dir reasoning_parser return_perf_metrics
perf_metrics_max_requests orchestrator_type backend torch_compile_config disable_overlap_scheduler
attn_backend enable_iter_perf_stats enable_iter_req_stats iter_stats_max_iterations request_stats_max_iterations
print_iter_log batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio enable_autotuner
enable_min_latency stream_interval force_dynamic_quantization allreduce_strategy checkpoint_format kv_connector_config
garbage_collection_gen0_threshold mm_encoder_only ray_worker_extension_cls custom_tokenizer pp_partition
otlp_traces_endpoint env_overrides nvfp4_gemm_config max_stats_len sampler_force_async_worker
enable_layerwise_nvtx_marker"""
_NESTED: dict[str, Any] = {
    "scheduler_config": SchedulerConfig, "lora_config": LoraConfig,
}  # fmt: skip
_OWN = {
    False: {"kv_cache_config": KvCacheConfig, "speculative_config": DecodingBaseConfig, "sampler_type": str,
            "cuda_graph_config": CudaGraphConfig12, "moe_config": MoeConfig},
    True: {"kv_cache_config": KvCacheConfig13, "speculative_config": Speculation13, "generation_config": str,
           "cuda_graph_config": CudaGraphConfig, "moe_config": Any},
}  # fmt: skip


def _arguments(later: bool) -> Any:
    """TorchLlmArgs: no field but these."""
    kinds = {**dict.fromkeys(_COMMON.split(), Any), **_NESTED, **_OWN[later]}
    fields: dict[str, Any] = {name: (kind | None if kind is not Any else Any, None) for name, kind in kinds.items()}
    return pydantic.create_model("TorchLlmArgs", __base__=_Strict, **fields)


TorchLlmArgs = _arguments(not __version__.startswith("1.2"))


def update_llm_args_with_extra_dict(llm_args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """1.2.1's way from a dict to the objects that the arguments want."""
    extra = dict(extra)
    if "speculative_config" in extra:
        extra["speculative_config"] = DecodingBaseConfig.from_dict(extra["speculative_config"])
    return {**llm_args, **extra}


class LLM:
    """`later`: as 1.3. `events` wait for the next read; `kept` is what the first rank and the
    others hold of each step's statistics.
    """

    made: ClassVar[list["LLM"]] = []
    version: ClassVar[str] = __version__

    def __init__(
        self, model: Any, tokenizer: Any = None, tokenizer_mode: str = "auto", skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False, tensor_parallel_size: int = 1, dtype: str = "auto",
        revision: str | None = None, tokenizer_revision: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.later = not self.version.startswith("1.2")
        self.arguments = _arguments(self.later)(model=model, tensor_parallel_size=tensor_parallel_size, **kwargs)
        self.sampler = kwargs.get("sampler_type") or "TorchSampler"
        self.results: list[RequestOutput] = []
        self.down = self.dead = False
        # a shutdown aborts all requests (executor/proxy.py, `pre_shutdown`): they end with what they have, as
        # "cancelled" (executor/result.py, `_handle_sequence`)
        self.shutting_down = False
        # what ended a worker: the next submission shuts down and raises it (executor/proxy.py, `submit`;
        # executor/executor.py, `_handle_background_error`); what runs gets no further answer
        self.background: Exception | None = None
        self.has_shut_down = False
        #: what a step fails with that reaches token 666
        self.step_error = "cuda error"
        self._executor = SimpleNamespace(is_shutdown=lambda: self.dead or self.has_shut_down)
        self.world = tensor_parallel_size * (kwargs.get("pipeline_parallel_size") or 1)
        self.events: list[dict[str, Any]] = []
        self.kept: tuple[list[int], list[int]] = ([], [])
        self.reads = 0
        self._iteration = 0
        self.used = 7
        self.blocks: set[int] = set()
        # prompt tokens of the latest request that an earlier one with its salt had, in whole blocks
        self.cached = 0
        self._prefixes: set[tuple[Any, ...]] = set()
        LLM.made.append(self)

    def generate_async(
        self, inputs: Any, sampling_params: Any = None, lora_request: Any = None, prompt_adapter_request: Any = None,
        streaming: bool = False, kv_cache_retention_config: Any = None, disaggregated_params: Any = None,
        trace_headers: Any = None, scheduling_params: Any = None, cache_salt: str | None = None,
    ) -> RequestOutput:  # fmt: skip
        if self.dead:
            raise EngineDeadError("worker 0 exited") if self.later else RuntimeError("LLM is shutting down")
        if self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        if self.background is not None:
            self.has_shut_down = True
            raise self.background
        if len(inputs) > 100:
            raise RequestError("the prompt is longer than max_input_len")
        self._refuse_what_would_be_ignored(sampling_params)
        self._store(inputs)
        prefixes = [(cache_salt, *inputs[:end]) for end in range(32, len(inputs) + 1, 32)]
        self.cached = 32 * sum(one in self._prefixes for one in prefixes)
        self._prefixes.update(prefixes)
        self.results.append(RequestOutput(self, inputs, sampling_params, lora_request))
        return self.results[-1]

    def _store(self, prompt: list[int]) -> None:
        """Whole blocks of prompts, with hashes that mean nothing elsewhere (tensorrt_llm/_utils.py has the format)."""
        cache = self.arguments.kv_cache_config
        if not getattr(cache, "event_buffer_max_size", 0):
            return
        parent, size = None, cache.tokens_per_block
        for start in range(0, len(prompt) - size + 1, size):
            block = prompt[start : start + size]
            name = hash((parent, *block))
            if name not in self.blocks:
                self.blocks.add(name)
                tokens = [{"token_id": token} for token in block]
                data = {"type": "stored", "parent_hash": parent, "blocks": [{"block_hash": name, "tokens": tokens}]}
                self.events.append({"event_id": len(self.blocks), "data": data})
            parent = name

    def takes_the_most_likely(self, params: SamplingParams) -> bool:
        """1.2's TRTLLMSampler hands None on (sampling_params.py, `_get_sampling_config`), and both
        defaults are 0 (layers/defaultDecodingParams.h), which is greedy
        (kernels/samplingTopKKernels.h, `regularizeTopKTopP`).

        Its speculation inside the model takes the argmax unless `allow_advanced_sampling`
        (speculative/interface.py), and MTP always (pyexecutor/py_executor_creator.py, "Advanced
        sampling is not supported for MTP yet").
        """
        speculative = self.arguments.speculative_config
        if not self.later and isinstance(speculative, MTPDecodingConfig) and speculative.mtp_eagle_one_model:
            return True
        if not self.later and isinstance(speculative, (MTPDecodingConfig, EagleDecodingConfig)):
            if not speculative.allow_advanced_sampling:
                return True
        elif not self.later and self.sampler == "TRTLLMSampler":
            top_k, top_p = params.top_k or 0, params.top_p or 0.0
            return top_k == 1 or (top_k == 0 and top_p == 0.0)
        return _implies_greedy(params)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """One round trip to the worker, which blocks this thread (proxy.py, `get_kv_events`): what
        is there by then.
        """
        _off_the_loop()
        assert self.arguments.kv_cache_config.event_buffer_max_size > 0
        events, self.events = self.events, []
        return events

    def _refuse_what_would_be_ignored(self, params: SamplingParams) -> None:
        """The real ones ignore these without a word, or refuse them."""
        asked = [
            name for name in ("min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
            if getattr(params, name) is not None
        ]  # fmt: skip
        speculative = self.arguments.speculative_config
        bias = params.embedding_bias
        assert bias is None or (str(bias.dtype), bias.dim(), speculative) == ("torch.float32", 1, None)
        if not self.later:
            ignored = asked if self.sampler != "TRTLLMSampler" or speculative else []
        elif speculative:
            ignored = [one for one in asked if one == "min_p" or ("penalty" in one and not speculative.enable_penalty)]
        else:
            ignored = []
        assert not ignored, f"{ignored} would be ignored"

    def iterate(self) -> None:
        """A step. Each rank keeps its statistics until they are read, and only the first rank's
        ever are (issue #10447), at most `max_stats_len` of them: #10569, whose field 1.2.0 and
        1.2.1 have in llmapi/llm_args.py, `TorchLlmArgs`.
        """
        self._iteration += 1
        if not getattr(self.arguments, "enable_iter_perf_stats", None):
            return
        first, others = self.kept
        first.append(self._iteration)
        others.extend([self._iteration] * (self.world - 1))
        del first[:-1000], others[: -1000 * (self.world - 1)]

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """One round trip to the worker, which blocks this thread (proxy.py, `get_stats`): what is
        there by then.
        """
        _off_the_loop()
        self.reads += 1
        return self._fetched()

    def _fetched(self) -> list[dict[str, Any]]:
        running = sum(len(one.outputs[0].token_ids) for one in self.results if not (one.finished or one.aborted_))
        iterations = self.kept[0][:]
        del self.kept[0][: len(iterations)]
        used, config = self.used + running // 32, self.arguments.kv_cache_config
        # before #15075, every block in host memory counts as used
        host = 400 if not self.later and config is not None and config.host_cache_size else 0
        cache = {"maxNumBlocks": 100 + host, "usedNumBlocks": used + host, "tokensPerBlock": 32}
        return [
            {"iter": one, "kvCacheStats": {**cache, "reusedBlocks": 3}, "gpuMemUsage": 5000,
             "cpuMemUsage": 600, "pinnedMemUsage": 70, "inflightBatchingStats": {"numPausedRequests": 2}}
            for one in iterations
        ]  # fmt: skip

    def shutdown(self) -> None:
        self.down = True


def _implies_greedy(params: SamplingParams) -> bool:
    """1.2.1 sampling_params.py, `params_imply_greedy_decoding`."""
    unset = params.temperature is None and params.top_p is None and params.top_k is None
    return unset or params.top_k == 1 or params.top_p == 0.0 or params.temperature == 0


def _off_the_loop() -> None:
    """A round trip on an event loop's thread would hold every request up."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AssertionError("a blocking call on the thread of an event loop")


def api(version: str = __version__) -> SimpleNamespace:
    """The names of the library as of a version, as `llmops_engine.runtimes.trtllm_library.Library`
    has them.
    """
    later = not version.startswith("1.2")
    return SimpleNamespace(
        version=version,
        LLM=type("LLM", (LLM,), {"version": version}),
        SamplingParams=SamplingParams,
        GuidedDecodingParams=GuidedDecodingParams,
        LoRARequest=LoRARequest,
        arguments=_arguments(later),
        read_extra=None if later else update_llm_args_with_extra_dict,
    )
