"""The mock engine: what it says depends on nothing but what was said, and its cache does what a real one does."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmops_contract import KV_CLEARED, KV_STORED
from llmops_engine.engine_runtime import LENGTH, STOP, DeadEngineError
from llmops_engine.request import RequestRejectedError, RuntimeRequest
from llmops_engine.runtimes import paged
from llmops_engine.runtimes.faults import FaultFile, command_faults
from llmops_engine.runtimes.kv_cache import Changes, KvCache
from llmops_engine.runtimes.mock import MockRuntime
from llmops_engine.runtimes.paged import PagedMockRuntime, PagedOptions
from llmops_engine.runtimes.script import Cycle, Mixed
from llmops_engine.runtimes.step_times import StepTable

from llmops.kv_blocks import block_hashes
from tests.support.mock_engine.planned import BATCHES, CHUNKS, LENGTHS, PREFIXES, tabulated

TOKENS = st.integers(0, 3)
NO_TIME = StepTable((1,), (1,), [[0.0]], (1,), (0,), [[0.0]], [[0.0]])
SIZE = 4


# -- what it says ----------------------------------------------------------------------------------------------------
@given(st.sampled_from([Cycle, Mixed]), st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS), st.integers(0, 40))
def test_an_answer_that_goes_on_elsewhere_goes_on_as_it_would_have_here(script, text, prompt, said) -> None:
    whole = list(islice(script(text).after(prompt), said + 20))
    assert list(islice(script(text).after(prompt + whole[:said]), 20)) == whole[said:]


@given(st.lists(TOKENS, min_size=1, max_size=6), st.lists(TOKENS, max_size=30))
def test_a_cycle_goes_on_after_the_longest_end_that_begins_it(text, ids) -> None:
    longest = max(
        size for size in range(len(ids) + 1) if ids[len(ids) - size :] == [text[i % len(text)] for i in range(size)]
    )
    assert next(Cycle(text).after(ids)) == text[longest % len(text)]


def test_a_token_more_less_or_another_is_noticed() -> None:
    script = Mixed(range(1000))
    said = {tuple(islice(script.after(ids), 8)) for ids in ([1, 2, 3], [1, 2], [1, 2, 3, 3], [1, 3, 2], [2, 2, 3])}
    assert len(said) == 5


# -- the cache -------------------------------------------------------------------------------------------------------
def test_blocks_that_nobody_holds_are_found_until_their_place_is_needed() -> None:
    cache = KvCache(4)
    assert cache.take(2)
    cache.name(11)
    cache.name(12)
    cache.let_go([11, 12], 0)
    assert (cache.free, cache.found([11, 12, 13])) == (4, 2)
    assert cache.take(3)
    # the prompt's first block is worth more to others than what came later
    assert (cache.free, cache.found([11, 12])) == (1, 1)
    assert not cache.take(2)
    assert cache.changes() == Changes(False, [12], [11, 12])
    assert cache.changes() == Changes(False, [], [])


def test_blocks_with_the_same_content_are_one() -> None:
    cache = KvCache(4)
    cache.take(2)
    cache.name(11)
    cache.name(11)
    assert cache.free == 3
    cache.let_go([11], 0)
    assert (cache.free, cache.found([11])) == (3, 1)
    cache.drop()
    assert (cache.changes(), cache.found([11])) == (Changes(True, [], [11]), 1)
    cache.let_go([11], 0)
    cache.drop()
    assert (cache.changes(), cache.found([11])) == (Changes(True, [], []), 0)


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


def test_prompts_of_another_salt_share_nothing(tmp_path) -> None:
    runtime = engine(tmp_path)
    found = {}
    for key, salt in enumerate((0, 7, 7)):
        runtime.submit(key, request(range(9), 1, cache_salt=salt), 0)
        found.update({output.key: output.cached for output in runtime.step()})
    assert found == {0: 0, 1: 0, 2: 8}


def test_long_prompts_are_read_in_pieces_and_a_full_batch_lets_wait(tmp_path) -> None:
    runtime = engine(tmp_path, batch=2, room=8)
    for key in (1, 2, 3):
        runtime.submit(key, request(range(100 * key, 100 * key + 12), 3), 0)
    assert (runtime.stats().waiting, runtime.stats().context_tokens) == (3, 36)
    assert runtime.step() == []
    assert (runtime.stats().active, runtime.stats().waiting, runtime.stats().context_tokens) == (3, 1, 28)
    assert [output.key for output in runtime.step()] == [1]
    # the one that decodes comes first, the other reads what is left of the step
    assert [output.key for output in runtime.step()] == [1]
    assert runtime.stats().prefilled == 7
    assert [output.key for output in runtime.step()] == [1, 2]


def test_ends_and_refusals(tmp_path) -> None:
    runtime = engine(tmp_path, blocks=4)
    with pytest.raises(RequestRejectedError, match="the KV cache has 16 tokens, not 17"):
        runtime.submit(1, request(range(9), 8), 0)
    first, second, third = islice(Mixed(range(10, 20)).after([0]), 3)
    runtime.submit(2, request([0], 9, end_ids=frozenset({first})), 0)
    runtime.submit(3, request([0], 9, stop_words=[[second, third]], min_tokens=1), 0)
    assert run(runtime) == {2: ([first], STOP), 3: ([first, second, third], STOP)}


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


def test_it_lies_about_its_state_when_told_to(tmp_path) -> None:
    runtime = engine(tmp_path)
    runtime.submit(1, request([0]), 0)
    command_faults(tmp_path / "faults.json", lie={"kv_blocks_used": 7, "waiting": 0})
    stats = runtime.stats()
    assert (stats.waiting, stats.kv_blocks_used, stats.context_tokens) == (0, 7, 1)


# -- the time of a step ----------------------------------------------------------------------------------------------
class Steps:
    """Straight lines in each direction, as the planner's curves are between two points of the table."""

    def seconds(self, batch, length, prefill=None):
        read = 0 if prefill is None else 3 * prefill.tokens + 0.5 * prefill.prefix
        return 1 + 0.25 * batch + 0.001 * length + read


@given(
    st.integers(1, 2 * BATCHES[-1]),
    st.integers(1, 2 * LENGTHS[-1]),
    st.integers(1, CHUNKS[-1]),
    st.integers(0, PREFIXES[-1]),
)
def test_between_the_points_of_the_table_lie_straight_lines(batch, length, chunk, prefix) -> None:
    table, steps = tabulated(Steps()), Steps()
    assert table.seconds(batch, length) == pytest.approx(steps.seconds(batch, length))
    read = 3 * chunk + 0.5 * prefix
    assert table.seconds(batch, length, chunk, prefix) == pytest.approx(steps.seconds(batch, length) + read)
    assert table.seconds(0, 0, chunk, prefix) == pytest.approx(steps.seconds(0, 1) + read)
    assert table.seconds(0, 0) == 0


class Clock:
    """Time that passes where somebody sleeps, and then a little more."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self._late = 100.0, late

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late


STEPS = StepTable((1, 2), (1,), [[0.02], [0.03]], (1, 2), (0,), [[0.05], [0.06]], [[0.0], [0.0]])


def test_a_step_takes_as_long_as_the_table_says_and_longer_when_told_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(paged, "time", clock := Clock())
    runtime = engine(tmp_path, steps=STEPS)

    def seconds() -> float:
        begun = clock.now
        runtime.step()
        return clock.now - begun

    runtime.submit(1, request([0, 0], 9), 0)
    assert seconds() == pytest.approx(0.06)
    assert seconds() == pytest.approx(0.02)
    command_faults(tmp_path / "faults.json", slow=3)
    assert seconds() == pytest.approx(0.06)


def test_what_the_machine_takes_between_two_steps_makes_none_longer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(paged, "time", clock := Clock(late=0.001))
    runtime = engine(tmp_path, steps=STEPS)
    runtime.submit(1, request([0, 0], 4), 0)
    ends = []
    while runtime.has_work():
        runtime.step()
        ends.append(clock.now)
        clock.now += 0.015
    assert ends == pytest.approx([100.061, 100.081, 100.101, 100.121])
    # after a pause a step is as long as ever, however short the pause was
    runtime.submit(2, request([0, 0], 4), 0)
    runtime.step()
    assert clock.now == pytest.approx(100.121 + 0.015 + 0.061)
    # and so it is where the machine was away for longer than a step: nothing is made up for
    clock.now = 101.0
    runtime.step()
    assert clock.now == pytest.approx(101.021)
