"""Image matrix and LLM-API fields: a mismatch is refused and names what to use instead."""

from contextlib import nullcontext

import pytest

from llmops.build.engine_folder.manifest import EngineLimits, Parallelism
from llmops.build.trtllm.image_selection import check_image, check_trtllm_installed, image_for, image_of
from llmops.build.trtllm.llm_args import arguments_for_release, check_llm_args, make_llm_args
from llmops.build.trtllm.release_profiles import profile_of_release, profiles_per_release
from llmops.errors import InputError, VersionMismatchError
from llmops.model_repository.targets import find_target
from tests.support.manifests import engine_manifest
from tests.trtllm import standin

LIMITS = EngineLimits(max_batch_size=64, max_seq_len=4096, max_num_tokens=8192)
OLD, NEW = "1.2.1", "1.3.0rc29"
PAUSING = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
NGRAM, MTP, EAGLE3 = ({"decoding_type": name} for name in ("NGram", "MTP", "Eagle3"))


def test_engines_want_their_exact_version():
    assert image_for("tensorrt", "1.2.1").tag == "26.07"
    assert image_for("tensorrt", "1.2.0").tag == "26.03"
    assert check_image("tensorrt", "1.2.1", "26.05").triton == "2.69.0"
    with pytest.raises(VersionMismatchError, match=r"has TensorRT-LLM 1.2.0.*needs 1.2.1: use .*26\.07-trtllm"):
        check_image("tensorrt", "1.2.1", "26.03")
    with pytest.raises(VersionMismatchError, match=r"No Triton image serves target tensorrt of TensorRT-LLM 1.3.0"):
        image_for("tensorrt", "1.3.0")


def test_checkpoints_serve_on_every_later_release_but_not_before_1_2():
    assert image_of("26.03").targets == {"tensorrt", "pytorch"}
    assert image_of("nvcr.io/nvidia/tritonserver:25.12-trtllm-python-py3").targets == {"tensorrt"}
    check_trtllm_installed("pytorch", "1.2.1", "1.3.0")
    with pytest.raises(VersionMismatchError, match="no longer has TensorRT engines"):
        check_trtllm_installed("tensorrt", "1.2.1", "1.3.0")
    with pytest.raises(VersionMismatchError, match=r"known tags are 26\.07"):
        image_of("27.01")


@pytest.mark.parametrize(
    ("arguments", "vocabulary", "logit_bias", "guided"),
    [
        ({"guided_decoding_backend": "xgrammar"}, 512, True, ["json", "json_schema", "regex", "ebnf_grammar"]),
        ({"guided_decoding_backend": "llguidance"}, 513, False, ["json", "json_schema", "regex"]),
        ({"sampler_type": "TorchSampler"}, 513, True, []),
        # a paused request gets a new matcher (_torch/pyexecutor/guided_decoder.py, require_matcher_init; #18891)
        ({"guided_decoding_backend": "xgrammar", "scheduler_config": PAUSING}, 512, True, []),
    ],
)
def test_what_the_llm_api_takes_is_announced(arguments, vocabulary, logit_bias, guided):
    """llguidance reads a grammar as Lark's (1.2.1 _torch/pyexecutor/grammar_matcher.py, LLGuidanceMatcherFactory).

    TRTLLMSampler, the default here, is the C++ decoder (_torch/pyexecutor/sampler.py), which takes a bias only if the
    GPUs divide the vocabulary (cpp/tensorrt_llm/runtime/decoderState.cpp, reshapeBuffers).
    """
    manifest = engine_manifest("pytorch", extra={"tensorrt_llm": "1.2.1", "llm_args": arguments})
    tokenizer = manifest.tokenizer.model_copy(update={"vocab_size": vocabulary})
    changed = manifest.model_copy(update={"tokenizer": tokenizer, "parallelism": Parallelism(tp_size=2)})
    found = find_target("pytorch").capabilities(changed)
    assert (found["logit_bias"], found["guided"]) == (logit_bias, guided)


def test_prompt_logprobs_are_announced_where_the_logits_of_a_step_are_small():
    """1.2.1 `_torch/pyexecutor/py_executor.py`, `_forward_step`: if one request of a step wants its prompt's logits,
    `gather_context_logits` computes those of every token, `logits.float()` of modules/logits_processor.py; an error
    there ends all active requests (`_handle_errors`).
    """
    found = []
    for tokens, vocabulary in ((8192, 128_256), (4096, 128_256), (8192, 32_000), (None, 128_256)):
        manifest = engine_manifest("pytorch", extra={"tensorrt_llm": "1.2.1", "llm_args": {"max_num_tokens": tokens}})
        tokenizer = manifest.tokenizer.model_copy(update={"vocab_size": vocabulary})
        changed = manifest.model_copy(update={"tokenizer": tokenizer})
        found.append(find_target("pytorch").capabilities(changed)["prompt_logprobs"])
    assert found == [False, True, True, False]


def test_a_plan_decides_how_it_is_served_unless_the_user_does():
    plan = {"kv_cache_fraction": 0.83, "chunked_prefill": False, "tokens_per_block": 64, "gpu": "x"}
    made = make_llm_args(LIMITS, Parallelism(tp_size=2), "auto", {}, "1.2.1", plan=plan)
    cache = made["kv_cache_config"]
    assert (cache["free_gpu_memory_fraction"], cache["tokens_per_block"]) == (0.83, 64)
    assert made["enable_chunked_prefill"] is False
    wanted = {"enable_chunked_prefill": True, "kv_cache_config.free_gpu_memory_fraction": 0.5}
    made = make_llm_args(LIMITS, Parallelism(tp_size=2), "auto", wanted, "1.2.1", plan=plan)
    assert made["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
    assert made["enable_chunked_prefill"] is True


SPECULATIONS = "NGram, MTP, Eagle3, Draft_Target, AUTO, SaveState"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tensor_parallel": 8}, "did you mean tensor_parallel_size"),
        ({"quant_config": {}}, "no field quant_config"),
        ({"kv_cache_config": {"free_gpu_mem_fraction": 0.9}}, "did you mean kv_cache_config.free_gpu_memory_fraction"),
        # commands/serve.py: flags of trtllm-serve
        ({"kv_cache_free_gpu_memory_fraction": 0.8}, r"did you mean kv_cache_config\.free_gpu_memory_fraction\?"),
        ({"kv_cache_dtype": "fp8"}, r"did you mean kv_cache_config\.dtype\?"),
        ({"ep_size": 8}, r"did you mean moe_expert_parallel_size\?"),
        ({"moe_backend": "TRTLLM"}, r"did you mean moe_config\.backend\?"),
        ({"host_cache_size": 1 << 30}, r"did you mean kv_cache_config\.host_cache_size\?"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "between 0 and 1"),
        ({"kv_cache_config": {"enable_block_reuse": 1}}, "wants bool"),
        ({"max_batch_size": True}, "wants int"),
        ({"scheduler_config": {"capacity_scheduler_policy": "max_utilization"}}, "MAX_UTILIZATION"),
        ({"guided_decoding_backend": "outlines"}, "xgrammar, llguidance"),
        ({"speculative_config": {"decoding_type": "Medusa"}}, rf"is 'Medusa'; the LLM API takes {SPECULATIONS}\.$"),
        ({"speculative_config": {"decoding_type": "PARD", "max_draft_len": 2}}, "'PARD'; the LLM API takes NGram, MTP"),
        ({"speculative_config": NGRAM}, "NGram needs max_draft_len"),
        ({"speculative_config": {"max_draft_len": 2}}, rf"needs decoding_type; set one of {SPECULATIONS}\.$"),
        ({"speculative_config": {**NGRAM, "acceptance_rate_window_size": 2}}, "use acceptance_window"),
        ({"kv_cache_config": {"dtype": "fp8_ds_mla"}}, "takes auto, fp8, nvfp4"),
        ({"kv_cache_config": {"use_kv_cache_manager_v2": "auto"}}, r"1\.2 has no field kv_cache_config.use_kv"),
        ({"speculative_config": {**EAGLE3, "max_draft_len": 3}}, "needs max_draft_len and speculative"),
        ({"cuda_graph_config": {"batch_sizes": [1, 4], "max_batch_size": 4}}, "contradict each other"),
        ({"generation_config": "trtllm"}, r"1\.2 has no field generation_config"),
        ({"moe_config": {"backend": "AUTO"}}, "takes CUTLASS, CUTEDSL, WIDEEP, TRTLLM, DEEPGEMM, VANILLA, TRITON"),
        ({"kv_cache_config": {"max_attention_window": [0]}}, "max_attention_window"),
        # _torch/pyexecutor/py_executor.py: "Request beam width 1 is not equal to max_beam_width 4"
        ({"max_beam_width": 4}, "refuses requests without beam search; leave it out"),
        # examples/ray_orchestrator: "you need to first install Ray"
        ({"orchestrator_type": "ray"}, "have no Ray; leave orchestrator_type"),
        ({"orchestrator_type": "mpi"}, "have no Ray; leave orchestrator_type"),
        # cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp: "streamLLM is not supported at the moment"
        ({"kv_cache_config": {"sink_token_length": 4}}, "TensorRT-LLM has no sink tokens; leave"),
        # _torch/pyexecutor/resource_manager.py: "Invalid freeMemFraction … must be smaller than 1.0"
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1}}, "must be below 1 for an engine to start"),
        # llmapi/llm_args.py of both releases, KvCacheConnectorConfig: all three are required
        ({"kv_connector_config": {}}, "kv_connector_config needs connector_module, connector_scheduler_class and"),
        ({"kv_connector_config": {"connector_module": "m"}}, "needs connector_module, connector_scheduler_class and"),
        # _torch/pyexecutor/py_executor_creator.py, get_guided_decoding_config: `assert tokenizer is not None`
        ({"skip_tokenizer_init": True, "guided_decoding_backend": "xgrammar"}, "grammars need a tokenizer; leave"),
        # _torch/attention_backend/utils.py, get_attention_backend: another name falls back to TRTLLM
        ({"attn_backend": "FLASHINFR"}, "takes TRTLLM, FLASHINFER, VANILLA"),
        # py_executor_creator.py: `llm_args.attn_backend in ["FLASHINFER", …]`
        ({"attn_backend": "flashinfer"}, "takes TRTLLM, FLASHINFER, VANILLA"),
        # `batch_sizes: Optional[List[int]]`
        ({"cuda_graph_config": {"batch_sizes": ["a"], "max_batch_size": 8}}, "must be a list of whole numbers"),
        # 1.2.1 _torch/pyexecutor/py_executor.py: `max(self.llm_args.max_stats_len, 1)`
        ({"max_stats_len": -1}, "keeps one entry before TensorRT-LLM 1.3"),
        # cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray: "tokensPerBlock must be power of 2"
        ({"kv_cache_config": {"tokens_per_block": 48}}, "tokens_per_block is 48; it must be a power of two"),
    ],
)
def test_fields_are_checked_by_name_type_and_range(arguments, says):
    with pytest.raises(InputError, match=says):
        check_llm_args(arguments, "1.2.1")


#: Fields of 1.2.1's llmapi/llm_args.py, TorchLlmArgs, MoeConfig and CacheTransceiverConfig (the
#: source that NVIDIA publishes with the documentation of 1.2.1), which 1.3 has, too.
BOTH = {
    "custom_tokenizer": "deepseek_v32", "pp_partition": [20, 20], "otlp_traces_endpoint": "http://localhost:4317",
    "env_overrides": {"A": "1"}, "nvfp4_gemm_config": {"allowed_backends": ["cutlass"]}, "max_stats_len": 100,
    "sampler_force_async_worker": True, "enable_layerwise_nvtx_marker": True,
    "moe_config": {"use_low_precision_moe_combine": True}, "skip_tokenizer_init": True,
    "iter_stats_max_iterations": -1,
    "cache_transceiver_config": {"kv_transfer_sender_future_timeout_ms": 500},
}  # fmt: skip


#: 1.2.1's BaseLlmArgs and TorchLlmArgs (the source published with its documentation); 1.3 removed them, #11889 and
#: #16160 among others.
ENDED = ("disable_flashinfer_sampling", "enable_sleep", "fail_fast_on_attention_window_too_large")
DRAFT = {"max_draft_len": 4, "speculative_model": "/draft"}
PARD = {"decoding_type": "PARD", **DRAFT}
#: llmapi/llm_args.py at 0004396, where it is not said otherwise.
LATER = [
    # "Set to -1 to keep all entries"
    {"max_stats_len": -1}, {"generation_config": "auto"}, {"enable_tokenization_cache": True},
    {"disable_mm_encoder": True}, {"mla_skip_correction_threshold": 8.0}, {"use_cute_dsl_blockscaling_mm": True},
    {"gms_config": {"mode": "ro"}}, {"encoder_max_num_tokens": 8192}, {"moe_config": {"backend": "MARLIN"}},
    {"kv_cache_config": {"max_util_for_resume": 0.9, "use_kv_cache_manager_v2": "auto", "dtype": "fp8_ds_mla"}},
    {"scheduler_config": {"context_chunking_policy": "FORCE_CHUNK", "waiting_queue_policy": "priority"}},
    # developer-guide/telemetry of 1.3.0rc29
    {"attention_dp_config": {
        "enable_kv_cache_aware_routing": True, "kv_cache_routing_match_rate_threshold": 0.2,
        "kv_cache_routing_max_sessions": 64, "kv_cache_routing_new_conv_placement": "least_tokens"}},
    {"speculative_config": {"decoding_type": "DFlash", "acceptance_rate_threshold": 0.5, **DRAFT}},
    # KvCacheConnectorConfig; LMCache's guide to "lmcache-mp" in TensorRT-LLM gives both
    {"kv_connector_config": {"connector": "lmcache-mp", "server_url": "tcp://localhost:5555"}},
    # `KvCacheConfig`, `DecodeCudaGraphConfig`, `CacheTransceiverConfig`, `LoadFormat`
    {"kv_cache_config": {"enable_kv_pool_rebalance": True, "kv_pool_rebalance_ratio_threshold": 1.5}},
    {"cuda_graph_config": {"mode": "decode", "max_batch_size": 8}},
    {"cache_transceiver_config": {"backend": "NIXL", "kv_cache_bounce_size_mb": 64}}, {"load_format": "gms"},
    # llm-api/reference of 1.3.0rc29: AutoDecodingConfig; of 1.3.0rc27: DFlashDecodingConfig
    {"speculative_config": {"decoding_type": "AUTO", "max_draft_len": 4, "moe_backend": "CUTEDSL_FC12"}},
    {"speculative_config": {"decoding_type": "DFlash", "attention_backend": "FA4", **DRAFT}},
    # 1.3.0rc29's deployment-guide/deployment-guide-for-nemotron-3-on-trtllm, and its list of all fields in
    # developer-guide/telemetry
    {"moe_config": {"backend": "CUTEDSL_FC12"}},
    {"kv_cache_config": {"mamba_ssm_cache_dtype": "float16", "mamba_ssm_stochastic_rounding": True,
                         "mamba_ssm_philox_rounds": 5}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "releases"),
    [
        *(({name: value}, (OLD, NEW)) for name, value in BOTH.items()),
        *(({name: True}, (OLD,)) for name in ENDED),
        *((one, (NEW,)) for one in LATER),
    ],
)
def test_a_field_is_taken_by_the_releases_that_have_it(arguments, releases):
    says = {OLD: None, NEW: rf"1\.3 has no field {next(iter(arguments))}"}
    for version in (OLD, NEW):
        with nullcontext() if version in releases else pytest.raises(InputError, match=says[version]):
            check_llm_args(arguments, version)


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29"])
def test_the_largest_graph_replaces_our_list_of_graphs(version):
    """1.2.1 refuses both unless the list is its own (`TorchLlmArgs.validate_cuda_graph_config`, "Please
    don't set both"), 1.3 unless they agree. NVIDIA's guides give max_batch_size alone.
    """
    wanted = {"cuda_graph_config.max_batch_size": 32, "moe_config.backend": "TRTLLM"}
    made = make_llm_args(LIMITS, Parallelism(), "auto", wanted, version)
    assert made["cuda_graph_config"] == {"enable_padding": True, "max_batch_size": 32}
    standin.LLM("/model", **arguments_for_release(made, (1, 2)))
    with pytest.raises(ValueError, match="don't set both"):
        standin.LLM("/model", cuda_graph_config={"batch_sizes": [1, 64], "max_batch_size": 64})


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29"])
def test_a_null_for_graphs_turns_them_off(version):
    """1.2.1 and 1.3 llmapi/llm_args.py, `cuda_graph_config: Optional[…] = Field(default_factory=CudaGraphConfig)`."""
    made = make_llm_args(LIMITS, Parallelism(), "auto", {"cuda_graph_config": None}, version)
    assert made["cuda_graph_config"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"scheduler_config": {"gen_preemption": {}, "context_scheduling_policy": "shortest_uncached_first"}},
        {"kv_cache_config": {"disk_io_threads": 4}},
        {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 2, "draft_moe_dtype": "nvfp4"}},
    ],
)
def test_a_field_of_1_4_is_named_as_lacking_in_1_3(arguments):
    """1.4.0rc4's llm-api/reference: SchedulerConfig, KvCacheConfig, MTPDecodingConfig."""
    check_llm_args(arguments, "1.4.0rc4")
    with pytest.raises(InputError, match=r"the LLM API of TensorRT-LLM 1\.3 has no field "):
        check_llm_args(arguments, "1.3.0rc29")


NGRAM4 = {**NGRAM, "max_draft_len": 4}
SA = {"decoding_type": "SA", "max_draft_len": 4}
TREE = {**EAGLE3, **DRAFT, "use_dynamic_tree": True, "dynamic_tree_max_topK": 2}


@pytest.mark.parametrize(
    ("version", "speculative", "says"),
    [
        (OLD, {**NGRAM4, "num_nextn_predict_layers": 1}, "for .* MTP, not NGram"),
        (NEW, {**NGRAM4, "relaxed_topk": 2}, "for .* MTP, not NGram"),
        (OLD, {**MTP, "use_dynamic_tree": True}, "decoding_type Eagle3, not MTP"),
        (OLD, {"decoding_type": "Draft_Target", "max_matching_ngram_size": 2, **DRAFT}, "NGram, not Draft_Target"),
        (NEW, {**EAGLE3, "mask_token_id": 1, **DRAFT}, "PARD or DFlash or DSpark, not Eagle3"),
        (NEW, {"decoding_type": "DFlash", "block_size": 4, **DRAFT}, "for decoding_type DSpark, not DFlash"),
        (OLD, {**MTP, "max_draft_len": 3, "num_nextn_predict_layers": 1}, "no num_nextn_predict_layers"),
        (OLD, {**MTP, "max_draft_len": 0}, "at least 1"),
        (OLD, {"decoding_type": "SaveState", "output_directory": "/d"}, "needs output_directory and eagle3_layers"),
        (NEW, {"decoding_type": "SaveState"}, "needs output_directory"),
        (NEW, {"decoding_type": "PARD", "max_draft_len": 4}, "needs max_draft_len and speculative_model"),
        (NEW, {"decoding_type": "DFlash", "speculative_model": "/d"}, "needs max_draft_len and speculative"),
        (NEW, {"decoding_type": "DSpark"}, "DSpark needs max_draft_len"),
        (NEW, {"decoding_type": "DSpark", "block_size": 8, **DRAFT}, "block_size equal to max_draft_len"),
        (NEW, {"decoding_type": "MTP", "use_dynamic_tree": True}, "dynamic_tree needs .*dynamic_tree_max_topK"),
        # "max_draft_len must be set when use_dynamic_tree is True"
        (NEW, {**MTP, "use_dynamic_tree": True, "dynamic_tree_max_topK": 4}, "dynamic_tree needs max_draft_len"),
        # llmapi/llm_args.py at 0004396, SADecodingConfig.validate_sa_config, NGramDecodingConfig
        (NEW, {**NGRAM4, "max_matching_ngram_size": -1}, "of NGram must not be -1"),
        (NEW, {"decoding_type": "SA", "max_draft_len": 4, "max_matching_ngram_size": 0}, "of SA must not be 0"),
        (NEW, {"decoding_type": "SA", "max_draft_len": 4, "global_pool_size": 64}, "and enable_global_pool"),
        # SADecodingConfig.validate_sa_config: "or in [1, 64] when enable_global_pool is True"; TorchLlmArgs,
        # validate_speculative_config: "global_pool_size (64) must be >= max_batch_size (2048)"
        (NEW, {**SA, "enable_global_pool": True, "max_matching_ngram_size": 65}, "of SA must not be 65"),
        (NEW, {**SA, "enable_global_pool": True, "global_pool_size": 64}, "at least the maximum batch size"),
        # Eagle3 and MTP: "must be in [max_draft_len (4), dynamic_tree_max_topK * max_draft_len (8)]"
        (NEW, {**TREE, "max_total_draft_tokens": 3}, "max_total_draft_tokens is 3; .* between 4 and 8"),
        (NEW, {**TREE, "max_total_draft_tokens": 9}, "max_total_draft_tokens is 9; .* between 4 and 8"),
        (OLD, {**EAGLE3, "max_concurrency": 8, **DRAFT}, "does nothing before TensorRT-LLM 1.3"),
        (OLD, {**NGRAM4, "draft_len_schedule": {4: 4}}, "smallest batch size"),
        (OLD, {**NGRAM4, "draft_len_schedule": {"1": 2}}, "smallest batch size"),
        (OLD, {**NGRAM4, "draft_len_schedule": {"1": 4, "8": 5}}, "smallest batch size"),
        (NEW, {**NGRAM4, "draft_len_schedule": {"1": 4}}, "has another meaning in 1.3 than in 1.2"),
        (OLD, {"decoding_type": "NGram", "max_draft_len": 4, "draft_len_schedule": {1: 4, "4": 2, "8": 0}}, ""),
        (OLD, {"decoding_type": "Eagle3", "eagle3_one_model": False, "max_concurrency": 8, **DRAFT}, ""),
        (NEW, {"decoding_type": "Eagle3", "max_concurrency": 8, "use_dynamic_tree": False, **DRAFT}, ""),
        (NEW, {"decoding_type": "MTP", "max_draft_len": 3, "use_dynamic_tree": False}, ""),
        (NEW, {"decoding_type": "SA", "max_draft_len": 4, "enable_global_pool": True}, ""),
        # llm-api/reference: DSparkDecodingConfig
        (NEW, {"decoding_type": "DSpark", "max_draft_len": 4, "markov_rank": 0, "markov_head_type": "gated"}, ""),
        (NEW, {"decoding_type": "DFlash", "attention_backend": "TRTLLM", **DRAFT}, ""),
        (NEW, {**SA, "max_matching_ngram_size": -1}, ""),
        (NEW, {**SA, "max_matching_ngram_size": 65}, ""),
        (NEW, {**SA, "enable_global_pool": True, "global_pool_size": 2048}, ""),
        (NEW, {**TREE, "max_total_draft_tokens": 8}, ""),
        (NEW, {**EAGLE3, **DRAFT, "max_total_draft_tokens": 9}, ""),
        (OLD, {"decoding_type": "SaveState", "output_directory": "/d", "eagle3_layers_to_capture": [1]}, ""),
        (NEW, {"decoding_type": "SaveState", "output_directory": "/d"}, ""),
    ],
)
def test_options_of_one_speculation_are_refused_for_another(version, speculative, says):
    """1.2.1 llmapi/llm_args.py: each type is a class of its own with extra="forbid"; `MTPDecodingConfig.from_dict`,
    `SaveHiddenStatesDecodingConfig.validate`, `validate_draft_len_schedule_and_sort`. 1.3: the same file at 0004396,
    where `TorchLlmArgs.validate_speculative_config` has DSpark's and `MTPDecodingConfig` the tree's rules.
    The schedule's new meaning, and its control and max_concurrency's of speculation inside the model, came with
    #10860 (2026-01, in 1.3).
    """
    with pytest.raises(InputError, match=says) if says else nullcontext():
        check_llm_args({"speculative_config": speculative}, version)


@pytest.mark.parametrize("name", ["max_draft_len", "num_nextn_predict_layers"])
def test_mtp_drafts_as_many_tokens_in_each_release(name):
    """1.2.1's `MTPDecodingConfig.from_dict` overwrites max_draft_len with num_nextn_predict_layers, 1 by default; 1.3
    takes that name as max_draft_len, with a warning (`_remap_deprecated_num_nextn_predict_layers`).
    """
    arguments = {"speculative_config": {"decoding_type": "MTP", name: 3}}
    old, new = (arguments_for_release(arguments, minor)["speculative_config"] for minor in ((1, 2), (1, 3)))
    assert old == {"decoding_type": "MTP", "num_nextn_predict_layers": 3}
    assert new == {"decoding_type": "MTP", "max_draft_len": 3}


@pytest.mark.parametrize(
    ("kind", "field", "value"), [("Eagle3", "eagle3_one_model", True), ("MTP", "mtp_eagle_one_model", False)]
)
def test_1_3_gets_no_switch_between_one_and_two_models(kind, field, value):
    """1.3.0rc29's MTPDecodingConfig and Eagle3DecodingConfig (llm-api/reference of its published documentation) lack
    both fields, and `extra="forbid"` refuses them. Before, false was read as true
    (llmapi/llm_args.py at 0004396, `validate_eagle_config`, `log_two_model_deprecation_warning`).
    """
    arguments = {"speculative_config": {"decoding_type": kind, field: value, **DRAFT}}
    assert field in arguments_for_release(arguments, (1, 2))["speculative_config"]
    assert arguments_for_release(arguments, (1, 3))["speculative_config"] == {"decoding_type": kind, **DRAFT}


@pytest.mark.parametrize(
    "speculative",
    [
        {"decoding_type": "SaveState", "output_directory": "/d"},
        {"decoding_type": "PARD", "use_rejection_sampling": True, **DRAFT},
        {"decoding_type": "MTP", "use_rejection_sampling": True, "use_mtp_vanilla": True},
    ],
)
def test_speculation_that_1_3_does_not_start_beside_grammars_is_refused(speculative):
    """1.3 `_torch/pyexecutor/py_executor_creator.py`, "Guided decoding is not supported for speculative decoding mode"
    (`_torch/speculative/interface.py`, `support_guided_decoder`), and llmapi/llm_args.py at 0004396,
    `TorchLlmArgs.validate_speculative_config`, rs_guided_active.
    """
    with pytest.raises(InputError, match=r"and grammars; add --set llm\.guided_decoding_backend=null"):
        make_llm_args(LIMITS, Parallelism(), "auto", {"speculative_config": speculative}, "1.3.0rc29")
    without = {"speculative_config": speculative, "guided_decoding_backend": None}
    assert "guided_decoding_backend" not in make_llm_args(LIMITS, Parallelism(), "auto", without, "1.3.0rc29")


@pytest.mark.parametrize(
    ("other", "says", "releases"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", 2),
        ({"context_parallel_size": 2}, "context_parallel_size", 1),
        ({"enable_attention_dp": True}, "enable_attention_dp", 1),
        ({"speculative_config": {"decoding_type": "MTP"}}, "speculative_config", 2),
        ({"kv_cache_config": {"host_cache_size": 1 << 30}}, "kv_cache_config.host_cache_size", 1),
        ({"scheduler_config": PAUSING}, "scheduler_config.capacity_scheduler_policy other than GUARANTEED_NO_EVICT", 2),
    ],
)
def test_a_kv_cache_connector_is_refused_beside_what_moves_its_blocks(other, says, releases):
    """1.3.0rc29's features/kv-cache-connector; `_torch/pyexecutor/py_executor.py` and py_executor_creator.py of both
    releases, "KV Cache Connector is not supported with", "KV connector is only supported with guaranteed no evict".
    1.2 refuses fewer. The page calls enable_block_reuse false harmless ("at no correctness cost").
    """
    module = {"connector_module": "m", "connector_scheduler_class": "S", "connector_worker_class": "W"}
    connector, versions = {"kv_connector_config": module}, ["1.3.0rc29", "1.2.1"]
    for version in versions:
        check_llm_args({**connector, "kv_cache_config": {"host_cache_size": 0, "enable_block_reuse": False}}, version)
    for version in versions[:releases]:
        with pytest.raises(InputError, match=f"no kv_connector_config with {says}; leave"):
            check_llm_args({**connector, **other}, version)
    for version in versions[releases:]:
        check_llm_args({**connector, **other}, version)


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_the_newer_cache_manager_is_chosen_by_a_bool_or_auto(value):
    """1.3.0rc27 and later, llm-api/reference/KvCacheConfig: `bool | Literal['auto']`."""
    check_llm_args({"kv_cache_config": {"use_kv_cache_manager_v2": value}}, "1.3.0rc29")
    with pytest.raises(InputError, match="'yes'; the LLM API wants bool or auto"):
        check_llm_args({"kv_cache_config": {"use_kv_cache_manager_v2": "yes"}}, "1.3.0rc29")


WINDOWS = {"max_attention_window": [128, 4096]}


def test_a_kv_cache_connector_needs_one_window_before_1_3():
    """cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp of both releases, "not supported with multiple window sizes";
    1.3.0rc29's features/kv-cache-connector, "Running under VSWA": with the newer manager.
    """
    module = {"connector_module": "m", "connector_scheduler_class": "S", "connector_worker_class": "W"}
    arguments = {"kv_connector_config": module, "kv_cache_config": WINDOWS}
    older_manager = {**arguments, "kv_cache_config": {**WINDOWS, "use_kv_cache_manager_v2": False}}
    for refused, version in ((arguments, "1.2.1"), (older_manager, "1.3.0rc29")):
        with pytest.raises(InputError, match="no kv_connector_config with several windows in kv_cache_config"):
            check_llm_args(refused, version)
    check_llm_args(arguments, "1.3.0rc29")
    check_llm_args({**arguments, "kv_cache_config": {"max_attention_window": [4096, 4096]}}, "1.2.1")


@pytest.mark.parametrize(
    ("other", "says", "version"),
    [
        ({}, "cannot reuse blocks of the KV cache with attn_backend FLASHINFER; leave it out, or add --set", "1.2.1"),
        ({"kv_cache_config": WINDOWS}, "no attn_backend FLASHINFER with several windows", "1.3.0rc29"),
        ({"speculative_config": MTP}, "no attn_backend FLASHINFER with speculation by MTP", "1.3.0rc29"),
    ],
)
def test_another_attention_backend_is_refused_beside_what_it_lacks(other, says, version):
    """1.2's _torch/pyexecutor/py_executor_creator.py, "Disabling block reuse for"; #15692, "layer_idx or window_size
    must be provided for VSWA"; #19466, "only when the draft model shares the target KV cache" before it.
    """
    with pytest.raises(InputError, match=says):
        check_llm_args({"attn_backend": "FLASHINFER", **other}, version)
    check_llm_args({"attn_backend": "TRTLLM", **other}, version)


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29"])
@pytest.mark.parametrize("backend", ["FLASHINFER", "VANILLA"])
def test_another_attention_backend_is_accepted_without_reuse(backend, version):
    check_llm_args({"attn_backend": backend, "kv_cache_config": {"enable_block_reuse": False}}, version)


def test_a_disk_tier_needs_a_folder():
    """llmapi/llm_args.py at 0004396, `KvCacheConfig.validate_disk_cache_config`."""
    check_llm_args({"kv_cache_config": {"disk_cache_size": 1 << 40, "disk_cache_path": "/nvme"}}, "1.3.0rc29")
    check_llm_args({"kv_cache_config": {"disk_cache_size": 0}}, "1.3.0rc29")
    with pytest.raises(InputError, match=r"disk_cache_size needs disk_cache_path"):
        check_llm_args({"kv_cache_config": {"disk_cache_size": 1 << 40}}, "1.3.0rc29")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_beam_width": None, "pipeline_parallel_size": None, "speculative_config": NGRAM4},
        {"speculative_config": {**PARD, "use_rejection_sampling": True}, "context_parallel_size": None},
        {"kv_cache_config": {"enable_block_reuse": None, "tokens_per_block": None}, "attn_backend": None},
        {
            "kv_connector_config": {"connector": "lmcache"},
            "pipeline_parallel_size": None,
            "scheduler_config": {"capacity_scheduler_policy": None},
        },
    ],
)
def test_a_null_is_the_default(arguments):
    """`--set llm.FIELD=null` removes a field, and `{"FIELD": null}` in a group or a manifest reads alike."""
    kept = arguments_for_release(arguments, (1, 3))
    assert None not in [value for group in kept.values() if isinstance(group, dict) for value in group.values()]


@pytest.mark.parametrize("lora", [{"enable_lora": True}, {"lora_config": {}}])
def test_speculation_beside_adapters_needs_1_3(lora):
    """thop/loraOp.cpp counts one token for each request in generation: "LoraParams and input dims don't match"
    (NVIDIA/TensorRT-LLM #12617; #12661 of 2026-04 brought both together).
    """
    both = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2}, **lora}
    check_llm_args(both, "1.3.0rc29")
    with pytest.raises(InputError, match="every request of an adapter"):
        check_llm_args(both, "1.2.1")


@pytest.mark.parametrize("other", [{"torch_compile_config": {}}, {"enable_lora": True}, {"lora_config": {}}])
def test_breakable_prefill_graphs_are_refused_beside_what_1_3_does_not_start_with_them(other):
    """llmapi/llm_args.py at 0004396, `TorchLlmArgs.normalize_prefill_cuda_graph_config`, "breakable prefill CUDA graph
    does not support LoRA", "… torch_compile_config".
    """
    breakable = {"prefill_cuda_graph_backend": "breakable"}
    check_llm_args({**breakable, "enable_lora": False}, "1.3.0rc29")
    with pytest.raises(InputError, match=r"leave llm\.prefill_cuda_graph_backend out"):
        check_llm_args({**breakable, **other}, "1.3.0rc29")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"prefill_cuda_graph_backend": "disabled"}, {"enable_piecewise_cuda_graph": True}),
        ({"prefill_capture_num_tokens": [1, 2]}, {"capture_num_tokens": [1, 4]}),
        ({"prefill_capture_num_tokens": [[1]]}, {"capture_num_tokens": [1, 4]}),
    ],
)
def test_contradicting_fields_of_piecewise_graphs_are_refused(first, second):
    """llmapi/llm_args.py at 0004396, `TorchLlmArgs.normalize_prefill_cuda_graph_config`: "conflicts with"."""
    check_llm_args({"torch_compile_config": second}, "1.3.0rc29")
    same = {"enable_piecewise_cuda_graph": True, "capture_num_tokens": [2, 1]}
    newer = {"prefill_cuda_graph_backend": "piecewise", "prefill_capture_num_tokens": [1, 2]}
    check_llm_args({**newer, "torch_compile_config": same}, "1.3.0rc29")
    with pytest.raises(InputError, match=rf"{next(iter(second))} contradicts {next(iter(first))}; leave"):
        check_llm_args({**first, "torch_compile_config": second}, "1.3.0rc29")


@pytest.mark.parametrize(
    ("speculative", "says"),
    [
        (NGRAM4, "speculation by NGram"),
        ({**EAGLE3, **DRAFT, "sa_config": {}}, "sa_config"),
        ({**TREE, "dynamic_tree_max_topK": 33}, "dynamic_tree_max_topK above 32"),
        ({**MTP, "use_mtp_vanilla": True, "use_relaxed_acceptance_for_thinking": True}, "use_relaxed_acceptance"),
    ],
)
def test_rejection_sampling_is_refused_beside_what_1_3_does_not_start_with_it(speculative, says):
    """llmapi/llm_args.py at 0004396, `TorchLlmArgs.validate_speculative_config`, mtp_unsupported_combo: relaxed
    acceptance is refused for methods other than Eagle 3 and MTP in one model alone.
    """
    relaxed = {**MTP, "use_relaxed_acceptance_for_thinking": True, "use_rejection_sampling": True}
    check_llm_args({"speculative_config": relaxed}, "1.3.0rc29")
    wide = {**MTP, "dynamic_tree_max_topK": 33, "use_rejection_sampling": True}
    check_llm_args({"speculative_config": wide}, "1.3.0rc29")
    check_llm_args({"speculative_config": speculative}, "1.3.0rc29")
    with pytest.raises(InputError, match=f"no use_rejection_sampling with {says}"):
        check_llm_args({"speculative_config": {**speculative, "use_rejection_sampling": True}}, "1.3.0rc29")


@pytest.mark.parametrize("speculative", [{"decoding_type": "MTP"}, {"decoding_type": "eagle", **DRAFT}])
def test_the_sampler_that_cannot_speculate_is_refused(speculative):
    """1.2 `_torch/pyexecutor/_util.py`, validate_feature_combination, "trtllm_sampler and mtp enabled together is not
    supported yet", and so for Eagle 3 in one model and in two. 1.3 has no choice of samplers.
    """
    arguments = {"speculative_config": speculative, "sampler_type": "TRTLLMSampler"}
    with pytest.raises(InputError, match=r"with TRTLLMSampler; leave llm\.sampler_type out"):
        check_llm_args(arguments, "1.2.1")
    check_llm_args(arguments, "1.3.0rc29")
    check_llm_args({**arguments, "sampler_type": "auto"}, "1.2.1")


@pytest.mark.parametrize(("speculative", "version"), [
    (NGRAM4, "1.2.1"), ({**EAGLE3, "eagle3_one_model": False, **DRAFT}, "1.2.1"), ({**EAGLE3, **DRAFT}, "1.2.1"),
    (NGRAM4, "1.3.0rc29"), (MTP, "1.3.0rc29"),
])  # fmt: skip
def test_speculation_over_pipeline_stages_is_refused(speculative, version):
    """Both releases' `_torch/pyexecutor/py_executor.py`: "Drafting is not supported for selected executor loop"
    (#9009); 1.2.1 and 1.3.0rc29, feature-combination-matrix: no speculation with pipeline parallelism, but 1.2's tests
    have MTP with 4 stages (tests/integration/defs/accuracy/test_llm_api_pytorch.py, test_bfloat16_4gpus).
    """
    arguments = {"speculative_config": speculative, "pipeline_parallel_size": 2}
    with pytest.raises(InputError, match=r"speculation over pipeline stages; use --tp instead of --pp"):
        check_llm_args(arguments, version)
    check_llm_args({**arguments, "pipeline_parallel_size": 1}, version)
    check_llm_args({**arguments, "speculative_config": MTP}, "1.2.1")


def test_what_a_release_has_no_more_is_left_out_where_nothing_is_lost():
    arguments = {"sampler_type": "TRTLLMSampler", "kv_cache_config": {"onboard_blocks": True, "max_tokens": 64}}
    assert arguments_for_release(arguments, (1, 2)) == arguments
    assert arguments_for_release(arguments, (1, 3)) == {"kv_cache_config": {"max_tokens": 64}}
    lossy = {"speculative_config": {"decoding_type": "MTP", "acceptance_length_threshold": 1.5}}
    with pytest.raises(InputError, match=r"1\.3 has no field speculative_config.acceptance_length_threshold; use"):
        arguments_for_release(lossy, (1, 3))
    with pytest.raises(InputError, match=r"moe_config\.backend is 'WIDEEP'"):
        arguments_for_release({"moe_config": {"backend": "WIDEEP"}}, (1, 3))


def test_the_sampler_is_chosen_at_start_and_only_where_there_is_one():
    old, new = profiles_per_release({"backend": "pytorch"})
    stats = {"enable_iter_perf_stats": True}
    assert (old.wishes, old.log_probs) == ({"sampler_type": "TRTLLMSampler", **stats}, 1)
    assert (new.wishes, new.log_probs) == ({"generation_config": "trtllm", **stats}, 0)
    # 1.2.0 and 1.2.1 limit the statistics that other ranks keep (`max_stats_len`, #10569)
    old, new = profiles_per_release({"backend": "pytorch", "tensor_parallel_size": 8})
    assert [stats.items() <= one.wishes.items() for one in (old, new)] == [True, True]


def test_dynamic_trees_sample_as_1_3_documents():
    """1.3.0rc29, feature-combination-matrix, "Yes (MTP dynamic tree: greedy only)", and features/sampling: "Tree
    speculation (a dynamic tree) is not supported and such requests are rejected even when the flag is on".
    """
    tree = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "enable_penalty": True, **DRAFT}
    found = {}
    for kind in ("MTP", "Eagle3"):
        profile = profile_of_release({"speculative_config": {"decoding_type": kind, **tree}}, "1.3.0rc29")
        found[kind] = (profile.greedy_only, profile.sampling.penalties)
    assert found == {"MTP": (True, False), "Eagle3": (False, False)}
    # llmapi/llm_args.py at 0004396, Eagle 3 and MTP: "dynamic_tree_max_topK alone does not turn it on", which it did
    # in earlier release candidates
    for width in ({}, {"dynamic_tree_max_topK": 4}):
        linear = {**MTP, **width, "enable_penalty": True}
        profile = profile_of_release({"speculative_config": linear}, "1.3.0rc29")
        assert (profile.greedy_only, profile.sampling.penalties) == (False, True)
