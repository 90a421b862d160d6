"""The engine runtime over the LLM API, against a stand-in with the published signatures."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ENGINE = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1"


def _load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


standin = _load("trtllm_standin", Path(__file__).with_name("standin.py"))


@pytest.fixture(scope="module")
def engine():
    """The package as Triton imports it: from the model's version folder."""
    sys.path.insert(0, str(ENGINE))
    try:
        yield importlib.import_module("llmops_engine.trtllm_runtime")
    finally:
        sys.path.remove(str(ENGINE))


@pytest.fixture
def runtime(engine):
    options = engine.TrtllmOptions("model", "tokenizer", {"backend": "pytorch", "max_batch_size": 4}, False, 4)
    made = engine.TrtllmRuntime(options, library=standin)
    yield made
    made.close()
    assert standin.LLM.made[-1].down


def ask(engine, prompt, count, **fields):
    return engine.GenerationRequest(np.array(prompt, dtype=np.int64), count, **fields)


def collect(runtime, seconds=5.0):
    """{key: (tokens, log-probs, finish, error)} of everything that runs."""
    found: dict[int, tuple] = {}
    deadline = time.monotonic() + seconds
    while runtime.has_work() and time.monotonic() < deadline:
        for output in runtime.step():
            ids, log_probs, *_ = found.get(output.key, ([], [], "", ""))
            found[output.key] = (ids + output.token_ids, log_probs + output.log_probs, output.finish, output.error)
    return found


def test_tokens_and_reasons(engine, runtime):
    runtime.submit(1, ask(engine, [5, 10], 4, end_ids=frozenset({99})), 0)
    runtime.submit(2, ask(engine, [20], 50, end_ids=frozenset({23, 500})), 0)
    found = collect(runtime)
    assert found[1][0] == [11, 12, 13, 14]
    assert found[1][2] == "length"
    assert found[2][0] == [21, 22, 23]
    assert found[2][2] == "stop"


def test_log_probs_are_of_the_chosen_token(engine, runtime):
    runtime.submit(1, ask(engine, [10], 2, log_probs=True), 0)
    assert collect(runtime)[1][1] == pytest.approx([-0.11, -0.12])


def test_stop_words_of_several_tokens_end_a_sequence_there(engine, runtime):
    runtime.submit(1, ask(engine, [10], 50, stop_words=[[13, 14]]), 0)
    ids, _, finish, _ = collect(runtime)[1]
    assert finish == "stop"
    assert ids[:2] == [11, 12]
    assert len(ids) <= 4


def test_cancel_reaches_the_library(engine, runtime):
    runtime.submit(1, ask(engine, [10], 10_000), 0)
    while not list(runtime.step()):
        pass
    runtime.cancel(1)
    assert not runtime.has_work()
    deadline = time.monotonic() + 5
    while not standin.LLM.made[-1].results[0].aborted() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert standin.LLM.made[-1].results[0].aborted()
    assert collect(runtime, 0.2) == {}


def test_a_failing_request_fails_alone(engine, runtime):
    runtime.submit(1, ask(engine, [663], 10), 0)
    runtime.submit(2, ask(engine, [10], 3), 0)
    runtime.submit(3, ask(engine, list(range(200)), 3), 0)
    found = collect(runtime)
    assert (found[1][2], found[1][3]) == ("failed", "input_ids: cuda error")
    assert found[2][0] == [11, 12, 13]
    assert found[3][3] == "input_ids: the prompt is longer than max_input_len"


def test_sampling_is_handed_over(engine):
    request = ask(engine, [1], 7, end_ids=frozenset({2, 9}), stop_words=[[4]], min_tokens=3)
    request.sampling.temperature, request.sampling.top_p, request.sampling.seed = 0.7, 0.9, 41
    request.sampling.repetition_penalty = 1.2
    made = engine.sampling_params(standin, request, 1)
    assert (made.max_tokens, made.min_tokens, made.end_id, made.stop_token_ids) == (7, 3, 2, [9, 4])
    assert (made.temperature, made.top_p, made.seed, made.repetition_penalty) == (0.7, 0.9, 42, 1.2)
    assert (made.detokenize, made.add_special_tokens, made.ignore_eos, made.logprobs) == (False, False, False, None)


def test_greedy_and_ignored_end(engine):
    request = ask(engine, [1], 7)
    request.sampling.temperature = 0
    made = engine.sampling_params(standin, request, 0)
    assert (made.top_k, made.temperature, made.ignore_eos) == (1, None, True)


@pytest.mark.parametrize(
    ("guide", "field", "value"),
    [
        (("json", ""), "json_object", True),
        (("json_schema", '{"type": "object"}'), "json", '{"type": "object"}'),
        (("regex", "[a-z]+"), "regex", "[a-z]+"),
        (("ebnf_grammar", 'root ::= "a"'), "grammar", 'root ::= "a"'),
    ],
)
def test_guides(engine, guide, field, value):
    made = engine.sampling_params(standin, ask(engine, [1], 7, guide=guide), 0)
    assert getattr(made.guided_decoding, field) == value


def test_a_schema_that_is_not_json_is_refused(engine):
    with pytest.raises(engine.Refused, match="guided_decoding_guide: is not JSON"):
        engine.sampling_params(standin, ask(engine, [1], 7, guide=("json_schema", "{")), 0)


def test_stats(engine, runtime):
    runtime.submit(1, ask(engine, [10, 11, 12], 10_000), 0)
    stats = runtime.stats()
    assert (stats.active, stats.context_tokens, stats.max_requests) == (1, 3, 4)
    assert (stats.kv_blocks_max, stats.kv_blocks_used, stats.tokens_per_block) == (100, 7, 32)
