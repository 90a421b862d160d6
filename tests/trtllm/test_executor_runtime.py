"""The engine runtime over TensorRT-LLM's executor, against a stand-in as strict as its bindings of 1.2.1."""

import json
import shutil
import sys
from contextlib import closing, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from llmops_engine.request import RequestRejectedError
from llmops_engine.runtimes import executor as engine
from llmops_engine.runtimes import remote

from llmops.contract import KV_CLEARED, KV_STORED
from llmops.kv_blocks import adapter_salt, block_hashes
from tests.support.model_code import version_folder
from tests.support.programs import install_program
from tests.trtllm import standin_executor as standin
from tests.trtllm.installed import MPIRUN, install_executor
from tests.trtllm.runtime_requests import ask, collect
from tests.trtllm.standin import XgrammarGrammar

PARAMETERS = {
    "batch_scheduler_policy": "guaranteed_no_evict", "kv_cache_free_gpu_mem_fraction": "0.9",
    "kv_cache_host_memory_bytes": "0", "enable_kv_cache_reuse": "true", "enable_chunked_context": "true",
    "decoding_mode": "top_k_top_p", "normalize_log_probs": "false",
}  # fmt: skip
CARD = {"max_batch_size": 4, "end_ids": [99, 98]}


@pytest.fixture
def folder(tmp_path):
    """An engine of one GPU whose KV-cache blocks have four tokens."""
    config = {"build_config": {"plugin_config": {"tokens_per_block": 4}}, "pretrained_config": {"vocab_size": 1003}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def make(folder, **parameters):
    options = engine.ExecutorOptions(str(folder), 1, 4, {**PARAMETERS, **parameters}, (99, 98))
    return engine.ExecutorRuntime(options, standin)


@pytest.fixture
def runtime(folder):
    made = make(folder)
    yield made
    made.close()
    assert standin.Executor.made[-1].down


def test_tokens_log_probabilities_and_reasons(runtime):
    runtime.submit(1, ask([5, 10], 4, end_ids=frozenset({99}), log_probs=True), 0)
    runtime.submit(2, ask([90], 50, end_ids=frozenset({99, 98})), 0)
    runtime.submit(3, ask([20], 50, stop_words=[[23, 24]]), 0)
    runtime.submit(4, ask([96], 50, end_ids=frozenset({99}), log_probs=True), 0)
    found = collect(runtime)
    assert found[1][:3] == [[11, 12, 13, 14], pytest.approx([-0.11, -0.12, -0.13, -0.14]), "length"]
    # the further end of text is a stop word
    assert found[2][:3] == [[91, 92, 93, 94, 95, 96, 97, 98], [], "stop"]
    assert found[3][:3] == [[21, 22, 23, 24], [], "stop"]
    # the library does not return the end of text itself
    assert found[4][:3] == [[97, 98], pytest.approx([-0.97, -0.98]), "stop"]


def test_an_error_of_one_step_ends_what_runs_and_a_lost_gpu_ends_the_engine(runtime):
    """A step's error blames no request: gateways continue the answers on another replica (1.2.1
    cpp/tensorrt_llm/executor/executorImpl.cpp, terminateActiveRequests and fetchNewRequests).
    """
    runtime.submit(1, ask([663], 10), 0)
    runtime.submit(2, ask([10], 50), 0)
    runtime.submit(3, ask(list(range(101)), 2), 0)
    found = collect(runtime)
    for key in (1, 2):
        assert found[key][3].startswith("the engine failed: Encountered an error in forwardAsync function")
    assert found[3][3].startswith("input_ids: Encountered an error when fetching new request: ")
    runtime.submit(2, ask([10], 2), 0)
    assert collect(runtime)[2][0] == [11, 12]
    runtime.submit(3, ask([508], 10), 0)
    with pytest.raises(engine.DeadEngineError, match="an illegal memory access was encountered"):
        collect(runtime)


def test_kv_events_have_the_names_that_gateways_know(runtime):
    prompt = np.arange(10, 20)
    for key, salt in ((1, 0), (2, 7)):
        runtime.submit(key, ask(prompt, 2, cache_salt=salt), 0)
    collect(runtime)
    changes = list(runtime.take_kv_events())
    assert changes[0].kind == KV_CLEARED
    told = [name for change in changes if change.kind == KV_STORED for name in change.names]
    ids = prompt.astype(np.int32).tobytes()
    wanted = [name for salt in (0, 7) for name in block_hashes(ids, 4, adapter_salt(salt, 0))]
    assert sorted(told) == sorted(wanted)
    assert len(wanted) == 4


def test_a_library_without_salts_shares_cached_prefixes(folder, monkeypatch):
    """1.0's Request has no cache_salt_id (cpp/tensorrt_llm/nanobind/executor/request.cpp before #7106)."""
    fields = {name: kind for name, kind in standin.Request.fields.items() if name != "cache_salt_id"}
    monkeypatch.setattr(standin.Request, "fields", fields)
    monkeypatch.delattr(standin.Request, "cache_salt_id")
    with closing(make(folder)) as runtime:
        for key, salt in ((1, 7), (2, 8)):
            runtime.submit(key, ask(range(10, 20), 2, cache_salt=salt), 0)
            found = collect(runtime)
    assert found[2][0] == [20, 21]
    assert found[2][4] == 8


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (list(range(10, 20)), 8),
        # the last token of a prompt is always computed
        (list(range(10, 18)), 4),
        # a block that begins alike is not taken: no count of blocks would say how much of it was
        ([*range(10, 16), 500, 501, 502], 4),
        ([1, 2, 3], 0),
    ],
)
def test_cached_tokens_are_exact(runtime, prompt, cached):
    runtime.submit(1, ask(list(range(10, 22)), 2), 0)
    assert collect(runtime)[1][4] == 0
    runtime.submit(2, ask(prompt, 2), 0)
    assert collect(runtime)[2][4] == cached


def test_the_state_is_the_executors(runtime):
    before = runtime.stats()
    assert (before.kv_blocks_max, before.kv_blocks_reused, before.memory) == (0, None, ())
    runtime.submit(1, ask([10, 11, 12], 10_000), 0)
    waiting = runtime.stats()
    assert (waiting.active, waiting.context, waiting.context_tokens) == (1, 1, 3)
    list(runtime.step())
    stats = runtime.stats()
    assert (stats.kv_blocks_max, stats.tokens_per_block, stats.kv_blocks_reused, stats.paused) == (100, 4, 3, 2)
    assert (stats.prefilled, stats.context, stats.iteration) == (3, 0, 2)
    assert dict(stats.memory) == {"gpu": 5000, "cpu": 600, "pinned": 70}
    runtime.cancel(1)


def test_blocks_in_host_memory_are_not_the_gpus(folder):
    with closing(make(folder, kv_cache_host_memory_bytes="1000")) as runtime:
        assert runtime.stats()[6:8] == (0, 0)
        runtime.submit(1, ask([10, 11, 12], 1), 0)
        list(runtime.step())
        few = runtime.stats()
        runtime.submit(2, ask(list(range(40)), 10_000), 0)
        list(runtime.step())
        many = runtime.stats()
        assert 95 < few.kv_blocks_max == many.kv_blocks_max <= 100
        assert many.kv_blocks_used >= 9
        runtime.cancel(2)


def test_sampling_is_handed_over():
    request = ask([1], 7, end_ids=frozenset({2, 9}), stop_words=[[4]])
    request.sampling.temperature, request.sampling.top_p, request.sampling.seed = 0.7, 0.9, 41
    request.sampling.repetition_penalty = 1.2
    made = engine.make_request(standin, request, 1)
    sampled = made.sampling_config
    assert (made.max_tokens, made.end_id, made.pad_id, made.stop_words) == (7, 2, 2, [[9], [4]])
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.seed) == (0.7, 0.9, 0, 42)
    assert (sampled.repetition_penalty, sampled.min_tokens) == (1.2, None)
    assert (made.streaming, made.output_config.exclude_input_from_output) == (True, True)
    plain = engine.make_request(standin, ask([1], 7), 0).sampling_config
    # None for both would be greedy
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
    request.sampling.temperature = 0
    assert engine.make_request(standin, request, 0).sampling_config.top_k == 1


@pytest.mark.parametrize("end", [99, 12])
def test_min_tokens_holds_for_every_end_token(runtime, end):
    request = ask([10], 50, end_ids=frozenset({end, 13}), stop_words=[[12], [17]], min_tokens=5)
    runtime.submit(1, request, 0)
    assert collect(runtime)[1][:3] == [[11, 12, 13, 14, 15, 16, 17], [], "stop"]


def test_a_schema_that_is_not_json_is_refused():
    with pytest.raises(RequestRejectedError, match="guided_decoding_guide: is not JSON"):
        engine.make_request(standin, ask([1], 7, guide=("json_schema", "{")), 0)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [({"end_ids": frozenset({99})}, ""), ({"end_ids": frozenset({99}), "min_tokens": 2}, "min_tokens"), ({}, "end_id")],
)
def test_a_guided_answer_ends_with_its_guide(fields, refused):
    """The executor asks xgrammar for a mask of what follows the end, which throws ("GrammarMatcher has terminated
    after accepting the stop token", 0.1.25 cpp/grammar_matcher.cc), and that ends all requests (batch_manager/
    guidedDecoder.cpp, build). A stop word of one token ends an answer as well.
    """
    request = ask([1], 7, guide=("json", ""), stop_words=[[98]], **fields)
    said = f"^{refused}: leave it out; the guide decides where the answer ends$"
    with pytest.raises(RequestRejectedError, match=said) if refused else nullcontext():
        assert engine.make_request(standin, request, 0, model_ends=(99, 98))


def test_a_bias_has_the_length_of_the_engine_s_vocabulary(folder, runtime):
    """The decoder takes no other one, and its error ends all requests (1.2.1
    cpp/tensorrt_llm/batch_manager/createNewDecoderRequests.cpp, initializeEmbeddingBias).
    """
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"]["mapping"] = {"tp_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert engine._engine_sizes(folder) == (4, 1003)
    runtime.submit(1, ask([10], 2, embedding_bias=np.ones(1000, np.float32)), 0)
    assert collect(runtime)[1][0] == [11, 12]


def test_a_grammar_that_the_library_cannot_read_is_refused_before_it_ends_other_answers(monkeypatch):
    """The executor compiles it within a step (1.2.1 cpp/tensorrt_llm/batch_manager/guidedDecoder.cpp, build)."""
    monkeypatch.setitem(sys.modules, "xgrammar", SimpleNamespace(Grammar=XgrammarGrammar))
    assert engine.make_request(standin, ask([1], 7, guide=("ebnf_grammar", 'root ::= "a"')), 0)
    with pytest.raises(RequestRejectedError, match=r"^guided_decoding_guide: EBNF parser error: expected ::=$"):
        engine.make_request(standin, ask([1], 7, guide=("ebnf_grammar", "root")), 0)


def test_the_backends_parameters_become_the_executors(folder):
    info = folder / "info.json"
    info.write_text(json.dumps({"encoded_vocab": ["a"], "tokenizer_str": "{}", "stop_token_ids": [2]}))
    given = {
        "batch_scheduler_policy": "max_utilization", "kv_cache_host_memory_bytes": "1000",
        "max_attention_window_size": "512,1024", "max_tokens_in_paged_kv_cache": "4096", "decoding_mode": "lookahead",
        "lookahead_window_size": "7", "lookahead_ngram_size": "6", "lookahead_verification_set_size": "5",
        "xgrammar_tokenizer_info_path": str(info), "lora_prefetch_dir": "/adapters",
        "lora_cache_host_memory_bytes": "2000", "cuda_graph_mode": "true", "gpu_weights_percent": "0.5",
    }  # fmt: skip
    config = make(folder, **given)._executor.config
    cache, lookahead = config.kv_cache_config, config.decoding_config.lookahead_decoding_config
    assert config.scheduler_config.capacity_scheduler_policy.name == "MAX_UTILIZATION"
    assert (cache.host_cache_size, cache.max_attention_window, cache.max_tokens) == (1000, [512, 1024], 4096)
    assert (cache.enable_partial_reuse, cache.event_buffer_max_size, cache.free_gpu_memory_fraction) == (
        False, 65_536, 0.9,
    )  # fmt: skip
    assert config.decoding_config.decoding_mode.name == "Lookahead"
    assert (lookahead.max_window_size, lookahead.max_ngram_size, lookahead.max_verification_set_size) == (7, 6, 5)
    assert config.guided_decoding_config.stop_token_ids == [2]
    assert (config.peft_cache_config.lora_prefetch_dir, config.peft_cache_config.host_cache_size) == ("/adapters", 2000)
    assert (config.extended_runtime_perf_knob_config.cuda_graph_mode, config.gpu_weights_percent) == (True, 0.5)
    assert (config.normalize_log_probs, config.enable_chunked_context, config.max_batch_size) == (False, True, 4)


def test_no_weights_stay_on_the_gpu_if_the_engine_streams_all(folder):
    """1.2.1 cpp/tensorrt_llm/runtime/tllmRuntime.cpp, setWeightStreaming: a budget of 0 bytes, as NVIDIA's backend
    asks for (model_instance_state.cc); the executor's own default, 1.0, keeps all weights on the GPU.
    """
    assert make(folder, gpu_weights_percent="0.0")._executor.config.gpu_weights_percent == 0.0
    assert make(folder, iter_stats_max_iterations="0")._executor.config.iter_stats_max_iterations == 1000


@pytest.fixture
def several(tmp_path, monkeypatch):
    """An engine of two GPUs, an mpirun that starts its ranks and ends all with one, and the library's package."""
    engine, library = tmp_path / "engine", tmp_path / "code"
    engine.mkdir()
    config = {"pretrained_config": {"mapping": {"tp_size": 2, "pp_size": 1}}}
    (engine / "config.json").write_text(json.dumps(config))
    install_program(monkeypatch, tmp_path / "bin" / "mpirun", MPIRUN.format(python=sys.executable))
    # the worker sees the engine model's folder alone
    shutil.copytree(version_folder("tensorrt_llm"), library, ignore=shutil.ignore_patterns("__pycache__"))
    install_executor(library)
    monkeypatch.setattr(remote, "__file__", str(library / "llmops_engine" / "runtimes" / "remote.py"))
    return {**PARAMETERS, "gpt_model_path": str(engine), "world_size": "2"}


def test_an_engine_of_two_gpus_has_a_rank_for_each_and_leaves_none(several):
    with closing(engine.create(several, CARD)) as runtime:
        runtime.submit(1, ask(list(range(10, 50)), 4, log_probs=True), 0)
        found = collect(runtime)[1]
        assert found[:3] == [[50, 51, 52, 53], pytest.approx([-0.5, -0.51, -0.52, -0.53]), "length"]
        assert found[4] == 0
        names = [name for change in runtime.take_kv_events() for name in change.names]
        assert len(names) == 1
    assert runtime._process.returncode == 0


def test_a_rank_that_dies_ends_the_engine(several):
    runtime = engine.create(several, CARD)
    runtime.submit(1, ask([508], 10), 0)
    with pytest.raises(engine.DeadEngineError, match="illegal memory access"):
        collect(runtime)
    runtime.close()
