"""The mock engine: what it says depends on nothing but what was said, and its cache does what a real one does."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmops_contract import KV_CLEARED, KV_STORED
from llmops_engine.engine_runtime import LENGTH, DeadEngineError
from llmops_engine.request import RequestRejectedError, RuntimeRequest
from llmops_engine.runtimes.faults import FaultFile, command_faults
from llmops_engine.runtimes.mock import MockRuntime
from llmops_engine.runtimes.paged import PagedMockRuntime, PagedOptions
from llmops_engine.runtimes.script import Cycle, Mixed
from llmops_engine.runtimes.step_times import StepTable

from llmops.kv_blocks import block_hashes

TOKENS = st.integers(0, 3)
NO_TIME = StepTable((1,), (1,), [[0.0]], (1,), (0,), [[0.0]], [[0.0]])
SIZE = 4


# -- what it says ----------------------------------------------------------------------------------------------------


# -- the cache -------------------------------------------------------------------------------------------------------


# -- the engine ------------------------------------------------------------------------------------------------------
def engine(tmp_path, blocks=64, batch=8, room=64, steps=NO_TIME) -> PagedMockRuntime:
    options = PagedOptions(batch, blocks, SIZE, room, steps)
    return PagedMockRuntime(options, Mixed(range(10, 20)), FaultFile(str(tmp_path / "faults.json")))


def request(ids, tokens=4, **fields) -> RuntimeRequest:
    return RuntimeRequest(np.array(ids, np.int64), tokens, **fields)


def run(runtime, paused: list[int] | None = None) -> dict[int, tuple[list[int], str]]:
    """The tokens of each key and how it ended; `paused` gets what each step says of that."""
    found: dict[int, tuple[list[int], str]] = {}
    while runtime.has_work():
        for output in runtime.step():
            ids, _ = found.get(output.key, ([], ""))
            found[output.key] = (ids + output.token_ids, output.finish)
        if paused is not None:
            paused.append(runtime.stats().paused)
    return found


@given(st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=24), st.integers(1, 24)), min_size=1, max_size=12))
def test_whoever_runs_beside_it_and_however_often_it_makes_room_an_answer_is_the_same(asked) -> None:
    options = PagedOptions(max_batch_size=4, blocks=14, tokens_per_block=SIZE, max_num_tokens=7, steps=NO_TIME)
    runtime = PagedMockRuntime(options, Mixed(range(10, 20)), FaultFile(""))
    for key, (prompt, tokens) in enumerate(asked):
        runtime.submit(key, request(prompt, tokens), 0)
    said = run(runtime)
    assert said == {
        key: (list(islice(Mixed(range(10, 20)).after(prompt), tokens)), LENGTH)
        for key, (prompt, tokens) in enumerate(asked)
    }
    stats = runtime.stats()
    assert (stats.active, stats.waiting, stats.kv_blocks_used, stats.context_tokens) == (0, 0, 0, 0)


def test_a_full_cache_makes_the_youngest_start_over(tmp_path) -> None:
    runtime = engine(tmp_path, blocks=6)
    runtime.submit(1, request(range(8), 12), 0)
    runtime.submit(2, request(range(50, 58), 12), 0)
    paused = []
    assert {key: len(ids) for key, (ids, _) in run(runtime, paused).items()} == {1: 12, 2: 12}
    # a figure of each step, as TensorRT-LLM has it
    assert paused.count(1) == 1
    assert set(paused) == {0, 1}


def test_a_prompt_seen_before_is_read_from_its_last_whole_block_on(tmp_path) -> None:
    runtime = engine(tmp_path)
    prompt = list(range(22))
    runtime.submit(1, request(prompt, 1), 0)
    runtime.step()
    assert runtime.stats().prefilled == 22
    assert list(runtime.take_kv_events()) == [(KV_STORED, block_hashes(np.array(prompt, np.int32).tobytes(), SIZE))]
    runtime.submit(2, request([*prompt, 7, 7], 9), 0)
    assert [(output.key, output.cached) for output in runtime.step()] == [(2, 20)]
    assert runtime.stats().prefilled == 4
    assert [output.cached for output in runtime.step()] == [None]
    command_faults(tmp_path / "faults.json", drop_kv=1)
    run(runtime)
    runtime.submit(3, request(prompt, 1), 0)
    runtime.step()
    # what ran when the cache was dropped was there still
    assert runtime.stats().prefilled == 2
    command_faults(tmp_path / "faults.json", drop_kv=2)
    runtime.submit(4, request(prompt, 1), 0)
    runtime.step()
    assert runtime.stats().prefilled == 22
    assert KV_CLEARED in [change.kind for change in runtime.take_kv_events()]


@pytest.mark.parametrize("kind", ["beat", "paged"])
def test_faults_come_and_go_on_command(tmp_path, kind) -> None:
    path = tmp_path / "faults.json"
    runtime = engine(tmp_path) if kind == "paged" else MockRuntime(0.001, 0, Cycle([1, 2]), 8, FaultFile(str(path)))
    runtime.submit(1, request([0], 100), 0)
    assert len(runtime.step()) == 1
    command_faults(path, stall=True)
    assert runtime.step() == []
    command_faults(path, refuse=True)
    assert len(runtime.step()) == 1
    with pytest.raises(RequestRejectedError, match=r"^queue: "):
        runtime.submit(2, request([0]), 0)
    command_faults(path, die=True)
    with pytest.raises(DeadEngineError):
        runtime.step()
    command_faults(path)
    assert len(runtime.step()) == 1


# -- the time of a step ----------------------------------------------------------------------------------------------
