"""The engine runtime over the LLM API, against a stand-in as strict as 1.2.1 and as 1.3."""

import ctypes
import gc
import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from llmops_engine.request import RequestRejectedError
from llmops_engine.runtimes import remote_worker
from llmops_engine.runtimes import trtllm as engine

from llmops.build.trtllm.release_profiles import profiles_per_release
from llmops.contract import KV_CLEARED, KV_STORED
from llmops.model_repository.generate import EngineEntry, model_metadata
from llmops.model_repository.targets import pytorch
from tests.support.manifests import engine_manifest
from tests.support.waiting import wait_until
from tests.trtllm import standin
from tests.trtllm.runtime_requests import ask, collect

ARGUMENTS = {"backend": "pytorch", "max_batch_size": 4}
VERSIONS = ["1.2.1", "1.3.0rc29", "1.3.0"]


def make(version: str = "1.2.1", arguments=None, **options):
    """A runtime on the stand-in of one version, as `llmops repo` would have it made."""
    profiles_ = [one.as_json() for one in profiles_per_release(arguments or ARGUMENTS)]
    made = engine.TrtllmOptions("model", "tokenizer", profiles_, 4, end_ids=(99,), **options)
    return engine.TrtllmRuntime(made, library=standin.api(version))


@pytest.fixture(params=VERSIONS)
def runtime(request):
    made = make(request.param)
    yield made
    made.close()
    assert standin.LLM.made[-1].down


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_alternatives_are_the_most_likely_tokens_without_the_sampled_one(version):
    """1.2 has them in TorchSampler alone, which may leave the sampled token out; 1.3 adds that one."""
    sampler = {"sampler_type": "TorchSampler"} if version == "1.2.1" else {}
    with closing(make(version, {**ARGUMENTS, **sampler}, capabilities={"top_logprobs": 20})) as runtime:
        runtime.submit(1, ask([10], 2, log_probs=True, top_log_probs=3), 0)
        outputs = []
        while runtime.has_work():
            outputs += runtime.step()
    tops = [place for output in outputs for place in output.tops]
    assert [[token for token, _ in place] for place in tops] == [[12, 13, 14], [13, 14, 15]]
    assert [value for _, value in tops[0]] == pytest.approx([-0.12, -0.13, -0.14])
    chosen = [value for output in outputs for value in output.log_probs]
    assert chosen == pytest.approx([-90.11, -90.12] if version == "1.3.0" else [-9999.0, -9999.0])


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_a_prompt_has_log_probabilities_for_each_token_though_it_is_cached(version):
    """1.2 leaves an unlikely token of the prompt out. Both give nothing for cached blocks."""
    prompt = [*range(10, 49), 70]
    places = []
    with closing(make(version, capabilities={"prompt_logprobs": True})) as runtime:
        for key, count in enumerate((2, 2, 0)):
            runtime.submit(key, ask(prompt, 1, prompt_log_probs=count), 0)
            (output,) = [output for _ in iter(runtime.has_work, False) for output in runtime.step()]
            places.append([[token for token, _ in place] for place in output.prompt])
    own = version == "1.3.0"
    assert places[0] == places[1] == [[t + 1, t + 2] for t in range(10, 48)] + [[49, 50, *([70] * own)]]
    assert [len(place) for place in places[2]] == [1] * 39
    assert places[2][-1] == ([70] if own else [49])


def test_alternatives_that_the_sampler_lacks_are_not_announced():
    with pytest.raises(ValueError, match=r"announces top_logprobs, which TensorRT-LLM 1.2.1 ignores"):
        make("1.2.1", capabilities={"top_logprobs": 20})


def begin(runtime):
    """Submit a long answer, and wait for its first tokens."""
    runtime.submit(1, ask([10], 10_000), 0)
    while not list(runtime.step()):
        pass


def test_cancel_reaches_the_library(runtime):
    begin(runtime)
    runtime.cancel(1)
    assert not runtime.has_work()
    wait_until(standin.LLM.made[-1].results[0].aborted)
    assert collect(runtime, 0.2) == {}


def test_a_failing_request_fails_alone(runtime):
    """An error after the library took the request is a step's, which ends what runs and blames no
    request (1.2.1 _torch/pyexecutor/py_executor.py, _handle_errors).
    """
    runtime.submit(1, ask([663], 10), 0)
    runtime.submit(2, ask([10], 3), 0)
    runtime.submit(3, ask(list(range(200)), 3), 0)
    found = collect(runtime)
    assert (found[1][2], found[1][3]) == ("failed", "the engine failed: cuda error")
    assert (found[2][0], found[3][3]) == ([11, 12, 13], "input_ids: the prompt is longer than max_input_len")


@pytest.mark.parametrize(("error", "dies"), [
    ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported", True),
    ("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMemcpyAsync(…): unspecified launch failure (x.h:1)", True),
    ("CUDA out of memory. Tried to allocate 4.20 GiB.", False),
    ("no rule 'CUDA error: device-side assert triggered'", False),
])  # fmt: skip
def test_a_lost_gpu_ends_the_engine(runtime, error, dies):
    """1.2.1 `_torch/pyexecutor/py_executor.py`, `_forward_step`: any error of a step ends what runs (`_handle_errors`),
    and the next step is tried; every one fails on a lost context (TensorRT-LLM #12718, "zombie worker pods").
    """
    standin.LLM.made[-1].step_error = error
    runtime.submit(1, ask([663], 10), 0)
    if dies:
        with pytest.raises(engine.DeadEngineError, match=r"illegal memory access|launch failure"):
            collect(runtime)
    else:
        assert collect(runtime)[1][2] == "failed"


@pytest.mark.parametrize("error", [OSError("a worker was killed"), ValueError("a worker was killed")])
def test_an_error_that_ended_a_worker_ends_the_engine(runtime, error):
    """`submit` shuts the executor down and raises what is in the queue of background errors (executor/proxy.py and
    executor/executor.py, `_handle_background_error`), of any type but RequestError. What runs gets no answer then;
    `is_shutdown` is what 1.2.1's llmapi/llm.py, `generate_async`, asks before each request.
    """
    begin(runtime)
    standin.LLM.made[-1].background = error
    runtime.submit(2, ask([10], 3), 0)
    with pytest.raises(engine.DeadEngineError, match="a worker was killed"):
        collect(runtime, 5)


def test_an_answer_that_the_library_cancels_is_not_complete(runtime):
    """1.2.1 executor/result.py, `_handle_sequence`: FinishReason.CANCELLED gives the reason "cancelled"."""
    begin(runtime)
    standin.LLM.made[-1].shutting_down = True
    said = "the engine failed: TensorRT-LLM ended the answer early, as cancelled"
    assert collect(runtime)[1][2:4] == ["failed", said]


def test_a_worker_process_blames_the_engine_for_what_it_did_not_expect():
    def submit(*_):
        raise OSError("no memory is left")

    failure = remote_worker._execute(SimpleNamespace(submit=submit), "submit", 1, ask([10], 3), 0)
    assert failure[-1] == "the engine failed: no memory is left"


def test_sampling_is_handed_over():
    request = ask([1], 7, end_ids=frozenset({2, 9}), stop_words=[[4]])
    request.sampling.temperature, request.sampling.top_p, request.sampling.seed = 0.7, 0.9, 41
    request.sampling.repetition_penalty = 1.2
    made = engine.sampling_params(standin, request, 1, 1)
    assert (made.max_tokens, made.min_tokens, made.end_id, made.stop_token_ids) == (7, None, 2, [9, 4])
    assert (made.temperature, made.top_p, made.top_k, made.seed) == (0.7, 0.9, 0, 42)
    assert made.repetition_penalty == 1.2
    request.min_tokens = 3
    made = engine.sampling_params(standin, request, 1, 1, (9, 2))
    # the model's own end comes first, and stop words are withheld with it
    assert (made.min_tokens, made.end_id, made.stop_token_ids) == (3, 9, [2])
    assert (made.detokenize, made.add_special_tokens, made.ignore_eos, made.logprobs) == (False, False, False, None)


def test_greedy_and_ignored_end():
    request = ask([1], 7)
    request.sampling.temperature = 0
    made = engine.sampling_params(standin, request, 0, 1, (98, 99))
    assert (made.top_k, made.temperature, made.ignore_eos) == (1, None, True)
    # the library takes -1 badly together with min_tokens: the model's own end, which is ignored
    assert (made.end_id, made.stop_token_ids) == (98, None)


@pytest.mark.parametrize(
    ("guide", "field", "value"),
    [
        (("json", ""), "json_object", True),
        (("json_schema", '{"type": "object"}'), "json", '{"type": "object"}'),
        (("regex", "[a-z]+"), "regex", "[a-z]+"),
        (("ebnf_grammar", 'root ::= "a"'), "grammar", 'root ::= "a"'),
    ],
)
def test_guides(guide, field, value):
    made = engine.sampling_params(standin, ask([1], 7, guide=guide), 0, 1)
    assert getattr(made.guided_decoding, field) == value


@pytest.mark.parametrize("backend", ["xgrammar", None])
def test_a_grammar_that_the_library_cannot_read_is_refused_before_it_reaches_a_step(backend, monkeypatch):
    """The library compiles it within a step (1.2.1 _torch/pyexecutor/guided_decoder.py, _build). The error
    ends all requests, or one where PyExecutor has _handle_guided_decoder_errors; no message says which.
    """
    monkeypatch.setitem(sys.modules, "xgrammar", SimpleNamespace(Grammar=standin.XgrammarGrammar))
    arguments = {**ARGUMENTS, **({"guided_decoding_backend": backend} if backend else {})}
    with closing(make("1.2.1", arguments)) as runtime:
        runtime.submit(1, ask([10], 2, guide=("ebnf_grammar", 'root ::= "b"')), 0)
        runtime.submit(2, ask([10], 2, guide=("json", "")), 0)
        if backend:
            with pytest.raises(RequestRejectedError, match=r"^guided_decoding_guide: EBNF parser error: expected ::=$"):
                runtime.submit(3, ask([10], 2, guide=("ebnf_grammar", "b")), 0)
        assert set(collect(runtime)) == {1, 2}


def test_llguidance_reads_a_guide_before_it_reaches_a_step(monkeypatch):
    """The matcher's factory raises ValueError within the step for a matcher that `is_error()` (1.2.1
    _torch/pyexecutor/grammar_matcher.py, LLGuidanceMatcherFactory). llguidance 0.7.29, which 1.2.1 and 1.3 install
    (requirements.txt): `validate_grammar_with_warnings` returns whether there is an error, and the error or warnings.
    """

    class LLMatcher:
        grammar_from_json_schema = grammar_from_regex = staticmethod(str)

        @staticmethod
        def validate_grammar_with_warnings(grammar):
            if "nope" in grammar:
                return True, ["Invalid type: nope\nat 1"]
            return False, ["a warning"]

    monkeypatch.setitem(sys.modules, "llguidance", SimpleNamespace(LLMatcher=LLMatcher))
    with closing(make("1.2.1", {**ARGUMENTS, "guided_decoding_backend": "llguidance"})) as runtime:
        runtime.submit(1, ask([10], 2, guide=("json_schema", '{"type": "object"}')), 0)
        runtime.submit(2, ask([10], 2, guide=("json", "")), 0)
        with pytest.raises(RequestRejectedError, match=r"^guided_decoding_guide: Invalid type: nope$"):
            runtime.submit(3, ask([10], 2, guide=("json_schema", '{"type": "nope"}')), 0)
        assert set(collect(runtime)) == {1, 2}


@pytest.fixture
def quick(monkeypatch):
    """Reads of statistics and events that follow each other at once."""
    monkeypatch.setattr(engine, "_STATS_PERIOD", 0.001)
    monkeypatch.setattr(engine, "_EVENTS_PERIOD", 0.001)
    monkeypatch.setattr(engine, "_RETRY_PERIOD", 0.001)


def test_statistics_are_read_as_long_as_the_runtime_lives(quick, runtime):
    """1.2.1's proxy asks its worker once per call (executor/proxy.py, aget_stats): the gauges froze
    after the first.
    """
    library = standin.LLM.made[-1]
    first = runtime.stats()
    assert (first.kv_blocks_max, first.kv_blocks_reused, first.memory) == (0, None, ())
    runtime.submit(1, ask([10, 11, 12], 10_000), 0)
    stats = runtime.stats()
    assert (stats.active, stats.context_tokens, stats.max_requests) == (1, 3, 4)
    wait_until(lambda: runtime.stats().kv_blocks_max)
    stats = runtime.stats()
    assert (stats.kv_blocks_max, stats.tokens_per_block, stats.kv_blocks_reused, stats.paused) == (100, 32, 3, 2)
    assert dict(stats.memory) == {"gpu": 5000, "cpu": 600, "pinned": 70}
    runtime.cancel(1)
    # whether or not anything runs
    for iteration in (1, 2, 3):  # blocks in use
        library.used = iteration
        library.iterate()
        wait_until(lambda wanted=iteration: runtime.stats().kv_blocks_used == wanted)


@pytest.mark.parametrize("version", VERSIONS)
def test_blocks_in_host_memory_are_not_the_gpus(quick, version):
    """Admission keeps a share of all blocks free: with much host memory, more than the GPU has."""
    arguments = {**ARGUMENTS, "kv_cache_config": {"host_cache_size": 1 << 34}}
    with closing(make(version, arguments)) as runtime:
        library = standin.LLM.made[-1]
        library.used = 0
        runtime.submit(1, ask([10, 11, 12], 1), 0)
        wait_until(lambda: runtime.stats().kv_blocks_max)
        library.used = 30
        library.iterate()
        wait_until(lambda: runtime.stats().kv_blocks_used)
        assert runtime.stats()[6:8] == (100, 30)
        runtime._forget_readings("statistics")
        assert runtime.stats()[6:8] == (0, 0)


REUSE = {**ARGUMENTS, "kv_cache_config": {"enable_block_reuse": True, "tokens_per_block": 4}}


def stored(number, tokens):
    block = {"block_hash": number, "tokens": [{"token_id": token} for token in tokens]}
    return {"event_id": number, "data": {"type": "stored", "parent_hash": None, "blocks": [block]}}


@pytest.mark.parametrize("version", VERSIONS)
def test_events_are_read_as_long_as_the_runtime_lives(quick, version):
    """An empty read raises asyncio.QueueEmpty (1.2.1 llmapi/utils.py, AsyncQueue.get): the reader
    ended with the first.
    """
    with closing(make(version, REUSE)) as runtime:
        library = standin.LLM.made[-1]
        runtime.submit(1, ask([1, 2, 3], 2), 0)
        collect(runtime)
        names = set()
        for number in (1, 2, 3):
            library.events.append(stored(number, range(number, number + 4)))
            found = []
            wait_until(lambda: found.extend(runtime.take_kv_events()) or found)  # noqa: B023 - called within the turn
            assert [change.kind for change in found] == [KV_STORED]
            names.update(found[0].names)
        assert len(names) == 3


def test_caches_of_several_attention_ranks_are_not_reported_as_one(quick):
    """Each rank numbers and evicts blocks of its own, and rank 0 returns the events of all (1.2.1
    batch_manager/kvCacheEventManager.cpp, exchangeAttentionDpThread; _torch/pyexecutor/resource_manager.py).
    """
    with closing(make("1.2.1", {**REUSE, "enable_attention_dp": True, "tensor_parallel_size": 2})) as runtime:
        library = standin.LLM.made[-1]
        library.events += [{**stored(1, range(4)), "attention_dp_rank": rank} for rank in (0, 1)]
        runtime.submit(1, ask(list(range(8)), 40), 0)
        assert len(collect(runtime)[1][0]) == 40
        assert (list(runtime.take_kv_events()), len(library.events)) == ([], 2)


def test_no_end_is_withheld_from_a_guided_answer():
    """If min_tokens withholds the only token that a complete text allows, another one comes, and the decoder's error
    about it is a step's (_torch/pyexecutor/guided_decoder.py, `_build`: "failed to accept last new token").
    """
    said = r"^min_tokens: leave it out; the guide decides where the answer ends$"
    refused = pytest.raises(RequestRejectedError, match=said)
    with closing(make("1.2.1", {**ARGUMENTS, "guided_decoding_backend": "xgrammar"})) as runtime, refused:
        runtime.submit(1, ask([10], 7, guide=("json", ""), min_tokens=2), 0)


def test_attention_dp_has_a_batch_and_a_cache_per_rank():
    """1.2.1 _torch/pyexecutor/executor_request_queue.py, `_fetch_new_requests_attention_dp`: requests are taken up to
    `tp_size * max_num_active_requests`. The statistics are those of rank 0 (TensorRT-LLM #13221 and #13649).
    """
    arguments = {"enable_attention_dp": True, "tensor_parallel_size": 2}
    extra = {"tensorrt_llm": "1.2.1", "llm_args": arguments}
    made = engine_manifest("pytorch", parallelism={"tp_size": 2}, extra=extra)
    assert model_metadata(EngineEntry("x", Path(), made, pytorch.target))["max_batch_size"] == 16
    with closing(make("1.2.1", {**REUSE, **arguments})) as runtime:
        runtime.submit(1, ask([10], 3), 0)
        collect(runtime)
        wait_until(lambda: runtime.stats().kv_blocks_max)
        assert (runtime.stats().kv_blocks_max, runtime.stats().kv_blocks_used) == (200, 14)


def test_events_that_fail_clear_what_is_known_and_go_on(quick, monkeypatch, capfd):
    with closing(make("1.2.1", REUSE)) as runtime:
        library, real = standin.LLM.made[-1], standin.LLM.made[-1].get_kv_cache_events
        answers = [RuntimeError("the beta broke")]

        def failing(timeout=2):
            if answers:
                raise answers.pop()
            return real(timeout)

        monkeypatch.setattr(library, "get_kv_cache_events", failing)
        library.events.append(stored(1, range(4)))
        runtime.submit(1, ask([1, 2, 3], 2), 0)
        found = []
        wait_until(lambda: found.extend(runtime.take_kv_events()) or len(found) == 2)
        assert [change.kind for change in found] == [KV_CLEARED, KV_STORED]
        assert capfd.readouterr().err.startswith("TensorRT-LLM's KV-cache events cannot be read (RuntimeError: the")


def resident() -> int:
    """Memory of this process in pages, without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize(
    ("version", "tp", "count"), [("1.2.1", 1, 400_000), ("1.2.1", 8, 400_000), ("1.3.0", 8, 400_000)]
)
def test_many_steps_cost_no_memory(quick, version, tp, count):
    """Issue #10447: every rank kept the statistics of all steps. #10569 limits them to
    `max_stats_len`, a field of `TorchLlmArgs` in 1.2.0 and 1.2.1 (llmapi/llm_args.py), too.
    """
    with closing(make(version, {**ARGUMENTS, "tensor_parallel_size": tp})) as runtime:
        library = standin.LLM.made[-1]
        runtime.submit(1, ask([10], 2), 0)
        collect(runtime)

        def steps(count):
            for _ in range(count // 5_000):
                for _ in range(5_000):
                    library.iterate()
                wait_until(lambda: len(library.kept[0]) < 5_000)
            # a reader, where there is one, lets go of all steps before it reads for the third time
            reads = library.reads
            wait_until(lambda: not reads or library.reads > reads + 2)

        steps(100_000)
        before, blocks = resident(), sys.getallocatedblocks()
        steps(count)
        assert sys.getallocatedblocks() <= blocks * 1.01
        # less than a pointer for each; Python takes and returns memory by the MiB
        assert (resident() - before) * os.sysconf("SC_PAGE_SIZE") < 8 * count
        assert runtime.stats().kv_blocks_max


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sampler", ["", "TorchSampler"])
def test_openais_default_sampling_draws(version, sampler):
    """Temperature 1, top_p 1 and no top_k: with None for both 1.2's TRTLLMSampler takes the most
    likely token (tensorrtllm_backend issues #221 and #528: the default is greedy).
    """
    if sampler and not version.startswith("1.2"):
        pytest.skip("1.3 has no choice of samplers")
    with closing(make(version, {**ARGUMENTS, **({"sampler_type": sampler} if sampler else {})})) as runtime:
        runtime.submit(1, ask([10], 2), 0)
        cold = ask([10], 2)
        cold.sampling.temperature = 0
        runtime.submit(2, cold, 0)
        collect(runtime)
        assert [one.greedy for one in standin.LLM.made[-1].results] == [False, True]


SPECULATING = [
    {"decoding_type": "MTP", "num_nextn_predict_layers": 1},
    {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/draft"},
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("speculative", SPECULATING)
def test_speculation_inside_the_model_respects_the_temperature(version, speculative):
    """1.2.1 _torch/speculative/interface.py: `if spec_metadata.allow_advanced_sampling: … else
    torch.argmax`. For MTP 1.2's py_executor_creator.py warns "Advanced sampling is not supported for MTP yet"; it came
    with #10019, after 1.2's branch.
    """
    with closing(make(version, {**ARGUMENTS, "speculative_config": speculative})) as runtime:
        if version.startswith("1.2") and speculative["decoding_type"] == "MTP":
            with pytest.raises(RequestRejectedError, match=r"^temperature: .* serve MTP with TensorRT-LLM 1\.3"):
                runtime.submit(1, ask([10], 2), 0)
            return
        runtime.submit(1, ask([10], 2), 0)
        collect(runtime)
        assert not standin.LLM.made[-1].results[0].greedy


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("end", [99, 12])
def test_min_tokens_holds_for_every_end_token(version, end):
    """The minimum-length penalty masks end_id alone, and stop words end a sequence at any length."""
    with closing(make(version)) as runtime:
        # as the gateway sends them: the first end token, and the others as stop words of one token
        request = ask([10], 50, end_ids=frozenset({end}), stop_words=[[12], [13], [17]], min_tokens=5)
        runtime.submit(1, request, 0)
        ids, _, finish, *_ = collect(runtime)[1]
        assert (ids, finish) == ([11, 12, 13, 14, 15, 16, 17], "stop")


def test_an_engine_that_died_says_so_once(runtime):
    runtime.submit(1, ask([507], 10), 0)
    said = "worker 0 exited" if standin.LLM.made[-1].later else "LLM is shutting down"
    with pytest.raises(engine.DeadEngineError, match=f"TensorRT-LLM: {said}"):
        collect(runtime)
    runtime.submit(2, ask([10], 10), 0)
    with pytest.raises(engine.DeadEngineError, match=said):
        collect(runtime)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "speculative",
    [
        {"decoding_type": "NGram", "max_draft_len": 4},
        {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/draft"},
        {"decoding_type": "draft_target", "max_draft_len": 3, "speculative_model_dir": "/draft"},
        {"decoding_type": "MTP", "num_nextn_predict_layers": 1},
    ],
)
def test_the_documented_speculation_starts(version, speculative):
    make(version, {**ARGUMENTS, "speculative_config": speculative}).close()
    config = standin.LLM.made[-1].arguments.speculative_config
    names = {"NGram": "NGram", "Eagle3": "Eagle", "draft_target": "Draft_Target", "MTP": "MTP"}
    wanted = names[speculative["decoding_type"]]
    assert config.decoding_type == ("Eagle3" if (wanted, version[:3]) == ("Eagle", "1.3") else wanted)
    if wanted == "NGram":
        assert config.max_matching_ngram_size == 2


@pytest.mark.parametrize("launched", [False, True])
def test_a_model_is_no_part_of_the_mpirun_that_started_triton(monkeypatch, launched):
    """The variables are those that triton_backend/all_models/llmapi/tensorrt_llm/1/model.py clears, and keeps."""
    job = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_UNIVERSE_SIZE", "OMPI_FIRST_RANKS", "PMIX_RANK",
           "OMPI_APP_CTX_NUM_PROCS", "OMPI_MCA_orte_x", "ORTE_x", "PMIX_SERVER_URI2", "PMI_RANK"}  # fmt: skip
    settings = {"OMPI_MCA_btl", "PMIX_MCA_gds"}
    # Open MPI 5 forks `prte` to spawn workers, which as root wants both of these (openpmix/prrte, "prte has detected
    # an attempt to run as root"); without, 5.0.11 and NVIDIA's image of 1.3.0rc27 ended with MPI_ERR_UNKNOWN
    root = ["PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"]
    for name in root:
        monkeypatch.setenv(name, "0")
    for name in job | settings:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TLLM_SPAWN_PROXY_PROCESS", "1" if launched else "")
    monkeypatch.setattr(engine, "TrtllmRuntime", lambda options: os.environ.copy())
    metadata = {"tokenizer_dir": "t", "max_batch_size": 1, "end_ids": [2], "capabilities": {}}
    left = engine.create({"gpt_model_path": "m", "llm_profiles": "[]"}, metadata)
    assert (job | settings).intersection(left) == (job | settings if launched else settings)
    assert [left[name] for name in root] == (["0", "0"] if launched else ["1", "1"])


def test_a_model_sees_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine.restrict_visible_gpus("")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    engine.restrict_visible_gpus("2,3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    engine.restrict_visible_gpus("0,2")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-c"
    with pytest.raises(ValueError, match=r"runs on GPU 2, but CUDA_VISIBLE_DEVICES=GPU-a,GPU-c shows only 2 GPUs"):
        engine.restrict_visible_gpus("2")
