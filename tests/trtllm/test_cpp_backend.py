"""Our config.pbtxt as NVIDIA's C++ backend reads it, against the facts about the backend in
cpp_backend.py.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from llmops import contract
from llmops.build.engine_folder.manifest import Parallelism
from llmops.build.trtllm.backend_parameters import checked_parameters
from llmops.errors import InputError
from llmops.gateway.interfaces import EngineRequest, SamplingParams
from llmops.gateway.triton.request_writer import RequestWriter
from llmops.model_repository.generate import (
    EngineEntry,
    generate_repository,
    model_folders,
    model_metadata,
    read_engines,
)
from llmops.model_repository.multi_gpu import export_launch
from llmops.model_repository.repository.manifest import RepositoryManifest
from llmops.model_repository.repository.pbtxt import parse_config
from llmops.model_repository.server.command import LaunchOptions
from llmops.model_repository.targets import find_target
from llmops.model_repository.targets.tensorrt import backend_settings
from tests.support.manifests import engine_manifest
from tests.support.scripted_triton import tensors_of
from tests.trtllm import cpp_backend


def make_engine(folder: Path, plugins: dict[str, object] | None = None, **extra: object) -> EngineEntry:
    """A built TensorRT engine as far as `repo` looks at it."""
    (folder / "model").mkdir(parents=True)
    built = {"build_config": {"plugin_config": {"use_paged_context_fmha": True, **(plugins or {})}}}
    (folder / "model" / "config.json").write_text(json.dumps(built))
    manifest = engine_manifest("tensorrt", extra={"tensorrt_llm": "1.2.1", **extra})
    return EngineEntry("tiny", folder, manifest, find_target("tensorrt"))


def engine_config(entry: EngineEntry):
    (config,) = [one.config for one in model_folders(entry) if one.name == "tiny-tensorrt_llm"]
    return parse_config(config, "tiny")


def loaded(entry: EngineEntry) -> dict[str, object]:
    return cpp_backend.load({name: one.string_value for name, one in engine_config(entry).parameters.items()})


def test_tensors_are_nvidias_own(tmp_path: Path) -> None:
    config = engine_config(make_engine(tmp_path / "e"))
    assert cpp_backend.as_table(config.input) == cpp_backend.table(cpp_backend.INPUTS)
    assert cpp_backend.as_table(config.output) == cpp_backend.table(cpp_backend.OUTPUTS)


def test_settings_reach_the_backend_as_they_were_meant(tmp_path: Path) -> None:
    serve = {"kv_cache_free_gpu_mem_fraction": 0.85, "max_attention_window_size": "4096,1024", "cuda_graph_mode": True}
    serve |= {"kv_cache_host_memory_bytes": "10000000000", "gpu_device_ids": "0,1;2,3", "gpu_weights_percent": 0.0}
    read = loaded(make_engine(tmp_path / "e", serve=serve))
    assert (read["kv_cache_free_gpu_mem_fraction"], read["max_attention_window_size"]) == (0.85, [4096, 1024])
    assert (read["cuda_graph_mode"], read["kv_cache_host_memory_bytes"]) == (True, 10_000_000_000)
    assert (read["enable_kv_cache_reuse"], read["enable_chunked_context"]) == (True, True)
    assert (read["gpu_device_ids"], read["gpu_weights_percent"]) == ("0,1;2,3", 0.0)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"enable_kv_cache_reuse": "yes"}, "serve.enable_kv_cache_reuse must be true or false, not yes"),
        ({"kv_cache_host_memory_bytes": "1e10"}, "must be a number of bytes, not 1e10"),
        ({"max_attention_window_size": "4096, 1024"}, "must be whole numbers of at least 1, separated by commas"),
        # 1.2.1 cpp/tensorrt_llm/executor/kvCacheConfig.cpp: TLLM_CHECK(freeGpuMemoryFraction < 1.F) and (… > 0)
        ({"kv_cache_free_gpu_mem_fraction": "1.0"}, "must be a number above 0 and below 1, such as 0.9, not 1.0"),
        ({"max_tokens_in_paged_kv_cache": "0"}, "must be a whole number from 1 to 999999999, not 0"),
        # model_state.cc: std::stoi throws out_of_range, and the backend warns and takes no limit; std::stoull reads -1
        # as 18446744073709551615
        ({"max_tokens_in_paged_kv_cache": "3000000000"}, "from 1 to 999999999, not 3000000000"),
        ({"kv_cache_host_memory_bytes": "-1"}, "must be a number of bytes, not -1"),
        ({"kv_cache_host_memory_bytes": "99999999999999999999"}, "must be a number of bytes, not 9999"),
        # executorConfig.cpp: TLLM_CHECK(iterStatsMaxIterations >= 0)
        ({"iter_stats_max_iterations": "-1"}, "must be a whole number of at most nine digits, not -1"),
        # model_instance_state.cc reads the sizes only with decoding_mode lookahead
        ({"lookahead_window_size": "7"}, "is not possible, because --set lookahead sets it; leave it out"),
        # 1.2 cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp (#6767): TLLM_CHECK of mSinkBlockTokenLength == 0
        ({"sink_token_length": "4"}, "is not possible, because TensorRT-LLM 1.2 loads no engine with it; leave"),
        ({"max_attention_window_size": "4096,0"}, "must be whole numbers of at least 1"),
        # cpp/tensorrt_llm/runtime/tllmRuntime.cpp, setWeightStreaming: if (gpuWeightsPercent < 1)
        ({"gpu_weights_percent": "20"}, "must be a number from 0 to 1, not 20"),
        ({"gpu_weights_percent": "-0.1"}, "must be a number from 0 to 1, not -0.1"),
        ({"kv_cache_free_gpu_mem_fraction": "1e-999"}, "must be a number above 0 and below 1, such as 0.9, not 1e-999"),
        ({"kv_cache_free_gpu_mem_fraction": "much"}, "must be a number above 0 and below 1, such as 0.9, not much"),
        ({"decoding_mode": "medusa"}, "must be top_k_top_p or lookahead, not medusa"),
        # 1.2.1 cpp/tensorrt_llm/layers/samplingLayer.cpp: one layer each, which skips all requests with the other's
        # parameter (kernels/samplingTopKKernels.h, setupTopKTopPRuntimeArgOne)
        ({"decoding_mode": "top_k"}, "must be top_k_top_p or lookahead, not top_k"),
        ({"decoding_mode": "top_p"}, "must be top_k_top_p or lookahead, not top_p"),
        ({"kv_cache_free_gpu_memory_fraction": "0.9"}, "has no parameter serve.kv_cache_free_gpu_memory_fraction"),
    ],
)
def test_what_it_would_only_warn_about_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        checked_parameters(given)


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("kv_cache_free_gpu_mem_fraction", 1e-05, "1e-05"), ("kv_cache_free_gpu_mem_fraction", "9e-1", "9e-1"),
    ("kv_cache_free_gpu_mem_fraction", "", ""), ("gpu_weights_percent", "0.", "0."),
    ("gpu_weights_percent", "1e0", "1e0"),
])  # fmt: skip
def test_numbers_are_taken_in_every_notation(tmp_path: Path, name: str, value: object, expected: str) -> None:
    entry = make_engine(tmp_path / "e", serve={name: value})
    assert backend_settings(entry.manifest, entry.directory)[name] == expected


@pytest.mark.parametrize(("ours", "least", "stop", "bad"), [
    (False, 5, None, [7, 8, 1, 2]), (False, 0, [7, 8, 1, 2], None), (True, 5, [7, 8, 1, 2], None),
])  # fmt: skip
def test_min_tokens_holds_for_every_end_token(ours, least, stop, bad):
    """The backend's minimum-length penalty masks END_ID alone; our model withholds the others by itself."""
    writer = RequestWriter("m", vocab_size=100, pad_id=None, extensions=ours)
    request = EngineRequest("", [1], 9, SamplingParams(temperature=0.0), end_ids=(2, 7, 8), min_tokens=least)
    found = tensors_of(writer.write(request))
    assert found[contract.END_ID.name] == [2]
    assert (found.get(contract.STOP_WORDS_LIST.name), found.get(contract.BAD_WORDS_LIST.name)) == (stop, bad)


def test_an_engine_without_paged_context_is_served_without_what_needs_it(tmp_path: Path) -> None:
    without = {"use_paged_context_fmha": False}
    read = loaded(make_engine(tmp_path / "a", without))
    assert (read["enable_kv_cache_reuse"], read["enable_chunked_context"]) == (False, False)
    with pytest.raises(InputError, match=r"serve.enable_chunked_context=true: the engine was built without paged"):
        loaded(make_engine(tmp_path / "b", without, serve={"enable_chunked_context": "true"}))


def test_a_configuration_of_an_engine_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """Before the fix, `repo` read a file of any size, and failed at lists in lists with a traceback."""
    engine = make_engine(tmp_path / "a")
    (tmp_path / "a/model/config.json").write_text("[" * 100_000)
    assert loaded(engine)["enable_kv_cache_reuse"]


def test_serving_chooses_the_backend_and_what_is_announced(tmp_path: Path) -> None:
    nvidia = make_engine(tmp_path)
    ours = dataclasses.replace(nvidia, target=find_target("tensorrt", "llmops"))
    cards = [json.loads(engine_config(one).parameters["llmops_model_metadata"].string_value) for one in (nvidia, ours)]
    assert [engine_config(one).backend for one in (nvidia, ours)] == ["tensorrtllm", "python"]
    assert [one["transports"] for one in cards] == [["request"], ["request", "step"]]
    assert [one["capabilities"]["logprobs"] for one in cards] == [True, True]
    assert [one["capabilities"]["logit_bias"] for one in cards] == [True, True]
    # what routing by the cache needs
    assert [(one["kv_events"], one["cached_tokens"]) for one in cards] == [(False, False), (True, True)]
    with pytest.raises(InputError, match="runs TensorRT engines only, not target pytorch: leave --serving nvidia out"):
        find_target("pytorch", "nvidia")


@pytest.mark.parametrize(
    ("weights", "vocabulary", "gpus", "announced"),
    [
        ("fp8", 32000, 4, [True, True]),
        ("fp8", 32001, 1, [True, True]),
        ("fp8", 32001, 2, [False, False]),
        ("int4_awq", 32001, 2, [False, True]),
    ],
)
def test_a_bias_is_announced_where_the_decoder_takes_one(tmp_path, weights, vocabulary, gpus, announced):
    """A bias of another length than the engine's padded vocabulary ends all requests (1.2.1
    cpp/tensorrt_llm/batch_manager/createNewDecoderRequests.cpp, initializeEmbeddingBias, and
    cpp/tensorrt_llm/runtime/decoderState.cpp, reshapeBuffers). ModelOpt pads that of AWQ to 64
    (torch/export/postprocess.py, pad_embedding_lm_head).
    """
    manifest = make_engine(tmp_path / "e").manifest
    changed = manifest.model_copy(update={
        "parallelism": Parallelism(tp_size=gpus),
        "tokenizer": manifest.tokenizer.model_copy(update={"vocab_size": vocabulary}),
        "quantisation": manifest.quantisation.model_copy(update={"weights": weights}),
    })  # fmt: skip
    found = [find_target("tensorrt", serving).capabilities(changed)["logit_bias"] for serving in ("nvidia", "llmops")]
    assert found == announced


@pytest.mark.parametrize(("asked", "written"), [(None, 40), (5, 13), (0, 8)])
def test_its_queue_is_as_long_as_ours(tmp_path: Path, asked: int | None, written: int) -> None:
    """The backend gives the queue policy's `max_queue_size` to its executor, which refuses more requests than that
    before a step takes them; 0 is any number (triton_backend/inflight_batcher_llm/src/model_instance_state.cc,
    getExecutorConfigFromParams; executor/executorImpl.cpp, enqueueRequests). A burst can fill the batch of 8, too.
    """
    entry = dataclasses.replace(make_engine(tmp_path / "e"), max_queue_size=asked)
    assert engine_config(entry).dynamic_batching.default_queue_policy.max_queue_size == written


def test_a_policy_that_pauses_requests_announces_no_grammars(tmp_path: Path) -> None:
    """batch_manager/guidedDecoder.cpp, build: a request in its first context step gets a new matcher, also one that
    was paused with tokens that it had generated.
    """
    for policy, kinds in (("guaranteed_no_evict", 4), ("max_utilization", 0)):
        entry = make_engine(tmp_path / policy, guided=True, serve={"batch_scheduler_policy": policy})
        assert len(entry.target.capabilities(entry.manifest)["guided"]) == kinds


@pytest.mark.parametrize("serving", ["nvidia", "llmops"])
def test_lookahead_announces_only_what_its_layer_does(tmp_path: Path, serving: str) -> None:
    """1.2.1: DecodingMode::Lookahead (cpp/include/tensorrt_llm/executor/types.h) has the penalty of
    minimum lengths alone, and no banned words; lookaheadDecodingLayer.cpp, forwardAsync, samples with
    maxTopK 1 and gives no log-probabilities; guidedDecoder.cpp reads the last token of a step only.
    """
    entry = make_engine(tmp_path / "e", guided=True, speculative=[7, 7, 7])
    ours = dataclasses.replace(entry, target=find_target("tensorrt", serving))
    (tmp_path / "e" / "xgrammar_tokenizer_info.json").write_text("{}")
    found = ours.target.capabilities(ours.manifest)
    refused = dict.fromkeys(("penalties", "bad_words", "min_p", "logprobs"), False)
    assert found.items() >= {**refused, "guided": [], "logit_bias": True}.items()
    parameters = engine_config(ours).parameters
    assert parameters["decoding_mode"].string_value == "lookahead"
    assert parameters["xgrammar_tokenizer_info_path"].string_value == ""


@pytest.mark.parametrize("serving", ["nvidia", "llmops"])
def test_an_engine_for_external_draft_tokens_announces_what_its_layer_does(tmp_path: Path, serving: str) -> None:
    """1.2.1 trtGptModelInflightBatching.cpp, getDecodingMode, always chooses DecodingMode::ExternalDraftTokens
    (types.h: penalties and banned tokens, no min_p); externalDraftTokensLayer.cpp leaves outputLogProbs null.
    """
    argv = ["trtllm-build", "--speculative_decoding_mode", "draft_tokens_external"]
    found = find_target("tensorrt", serving).capabilities(make_engine(tmp_path / "e", trtllm_build=argv).manifest)
    assert found.items() >= {"penalties": True, "bad_words": True, "min_p": False, "logprobs": False}.items()


@pytest.mark.parametrize("serving", ["nvidia", "llmops"])
def test_a_draft_takes_part_of_the_announced_length(tmp_path: Path, serving: str) -> None:
    """executorImpl.cpp hands getMaxDraftLen to LlmRequest::validate, which cuts answers: "Number of requested output
    tokens is changed to" maxSequenceLen - mPromptLen - draftLenPerEngineStep.
    """
    argv = ["trtllm-build", "--speculative_decoding_mode", "lookahead_decoding", "--max_draft_len", "83"]
    for name, built, draft in (("with", argv, 83), ("without", argv[:1], 0)):
        entry = make_engine(tmp_path / name, trtllm_build=built)
        found = model_metadata(dataclasses.replace(entry, target=find_target("tensorrt", serving)))
        assert found["max_seq_len"] == entry.manifest.limits.max_seq_len - draft


@pytest.mark.parametrize(("version", "salted"), [("1.0.0", False), ("1.1.0", False), ("1.2.0", True)])
def test_salts_are_announced_where_the_executor_has_them(tmp_path: Path, version: str, salted: bool) -> None:
    """Salts of cached prefixes came with #7106 (cpp/tensorrt_llm/nanobind/executor/request.cpp, cache_salt_id)."""
    manifest = make_engine(tmp_path / "e", tensorrt_llm=version).manifest
    assert find_target("tensorrt", "llmops").capabilities(manifest).get("cache_salt", False) is salted


def test_an_engine_of_two_gpus_runs_on_one_machine_with_our_model(tmp_path: Path) -> None:
    """`llmops repo --serving llmops` of an engine on GPUs 2 and 3 starts the ranks itself, and has no export."""
    made, repository = make_engine(tmp_path / "engine"), tmp_path / "repository"
    (tmp_path / "engine" / "tokenizer").mkdir()
    (tmp_path / "engine" / "tokenizer" / "tokenizer.json").write_text("{}")
    for rank in range(2):
        (tmp_path / "engine" / "model" / f"rank{rank}.engine").write_bytes(b"engine")
    made.manifest.model_copy(update={"parallelism": Parallelism(tp_size=2)}).save(tmp_path / "engine")
    engines = read_engines([str(tmp_path / "engine")], None, {"tiny": (2, 3)}, serving="llmops")
    generate_repository(engines, repository)
    (engine,) = RepositoryManifest.load(repository).engines.values()
    assert (engine.gpu_device_ids, engine.backend) == ("2,3", "python")
    parameters = parse_config((repository / "tiny-tensorrt_llm" / "config.pbtxt").read_text(), "tiny").parameters
    assert (parameters["world_size"].string_value, "executor_worker_path" in parameters) == ("2", False)
    with pytest.raises(InputError, match="--serving llmops, which runs all ranks of an engine on one machine"):
        export_launch("slurm", repository, LaunchOptions(), gpus_per_node=8, image=None, claim="models")


@pytest.mark.parametrize("name", ["participant_ids", "cancellation_check_period_ms"])
def test_a_setting_of_the_backend_alone_is_refused_with_our_model(tmp_path: Path, name: str) -> None:
    made = make_engine(tmp_path / "e", serve={name: "1"})
    (tmp_path / "e" / "model" / "rank0.engine").touch()
    with pytest.raises(InputError, match=f"serve.{name} of this engine is a setting of NVIDIA's C\\+\\+ backend alone"):
        find_target("tensorrt", "llmops").check(made.directory, made.manifest)
