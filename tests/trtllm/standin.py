"""A stand-in for `tensorrt_llm` with exactly the published signatures of 1.2: what does not exist there fails here.

Source: NVIDIA/TensorRT-LLM `tensorrt_llm/sampling_params.py`, `tensorrt_llm/llmapi/llm.py`, `tensorrt_llm/executor/
result.py`. It generates prompt[-1]+1, +2, … so that expected tokens can be written down; with an adapter +2, +4, …
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Any = None
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


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


class RequestOutput:
    """Cumulative outputs; iterated on the loop that was running when it was made, as the real one."""

    def __init__(self, prompt: list[int], params: SamplingParams, lora_request: LoRARequest | None) -> None:
        self.step = 2 if lora_request is not None else 1
        self.loop = asyncio.get_running_loop()
        self.prompt_token_ids, self.params = prompt, params
        self.outputs = [CompletionOutput(0, [], [])]
        self.finished = self.aborted_ = False

    def abort(self) -> None:
        self.aborted_ = True

    def aborted(self) -> bool:
        return self.aborted_

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        assert asyncio.get_running_loop() is self.loop
        completion, params = self.outputs[0], self.params
        if self.finished or self.aborted_:
            raise StopAsyncIteration
        await asyncio.sleep(0.002)
        token = self.prompt_token_ids[-1] + self.step * (len(completion.token_ids) + 1)
        if token == 666:
            raise RuntimeError("cuda error")
        ends = {params.end_id, *(params.stop_token_ids or [])} if not params.ignore_eos else set()
        completion.token_ids.append(token)
        if params.logprobs is not None:
            completion.logprobs.append({token: Logprob(-token / 100)})
        if token in ends:
            completion.finish_reason = "stop"
        elif len(completion.token_ids) >= params.max_tokens:
            completion.finish_reason = "length"
        self.finished = completion.finish_reason is not None
        return self


class LLM:
    made: ClassVar[list[LLM]] = []

    def __init__(
        self, model: Any, tokenizer: Any = None, tokenizer_mode: str = "auto", skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False, tensor_parallel_size: int = 1, dtype: str = "auto",
        revision: str | None = None, tokenizer_revision: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        from llmops.build.trtllm.llm_args import check_llm_args

        check_llm_args({"tensor_parallel_size": tensor_parallel_size, **kwargs}, "1.2.1")
        self.results: list[RequestOutput] = []
        self.down = False
        LLM.made.append(self)

    def generate_async(
        self, inputs: Any, sampling_params: Any = None, lora_request: Any = None, prompt_adapter_request: Any = None,
        streaming: bool = False, kv_cache_retention_config: Any = None, disaggregated_params: Any = None,
        trace_headers: Any = None, scheduling_params: Any = None,
    ) -> RequestOutput:  # fmt: skip
        if len(inputs) > 100:
            raise ValueError("the prompt is longer than max_input_len")
        self.results.append(RequestOutput(inputs, sampling_params, lora_request))
        return self.results[-1]

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return [{"iter": 1, "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 7, "tokensPerBlock": 32}}]

    def shutdown(self) -> None:
        self.down = True
