"""The engine thread with a runtime that fails on purpose: no request hangs, nobody else is harmed."""

import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmops_engine import loop as loop_module
from llmops_engine.engine_runtime import LENGTH, DeadEngineError, EngineRuntime, EngineStats, KvCacheEvent, StepOutput
from llmops_engine.loop import QUEUE_FULL_MESSAGE, ActiveRequest, EngineLoop
from llmops_engine.metrics import gauge_values
from llmops_engine.request import RequestRejectedError, RuntimeRequest

from llmops.round_robin import RoundRobinQueue
from tests.support.waiting import wait_until


class ScriptedRuntime(EngineRuntime):
    """Counts up for each sequence; `faults` maps a step number to what happens instead."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.faults: dict[int, Exception | StepOutput] = {}
        self.steps = 0
        self.refuse_from = 99
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, key: int, request: RuntimeRequest, sequence: int) -> None:
        if request.max_new_tokens == 13:
            raise ZeroDivisionError("unlucky")
        if sequence >= self.refuse_from:
            raise RequestRejectedError("num_return_sequences: too many")
        self.left[key] = request.max_new_tokens

    def cancel(self, key: int) -> None:
        self.left.pop(key, None)

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> Iterator[StepOutput]:
        self.gate.wait(60)
        self.steps += 1
        fault = self.faults.get(self.steps)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            self.left.pop(fault.key)
            yield fault
        for key in list(self.left):
            self.left[key] -= 1
            finished = self.left[key] == 0
            if finished:
                del self.left[key]
            yield StepOutput(key, [self.steps], [-0.5], LENGTH if finished else "")

    def stats(self) -> EngineStats:
        active = len(self.left)
        return EngineStats(active, active, 0, 0, 0, self.steps, 100, active, 32, 8)


class RecordingSink:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.cancelled = False
        self.begun, self.over = threading.Event(), threading.Event()

    def begin(self, sequence: int, cached: int | None, prompt) -> None:
        self.begun.set()

    def add_tokens(
        self, sequence: int, ids: list[int], log_probs: Any, finished: bool, last_sequence: bool, *_
    ) -> None:
        self.events.append((sequence, ids, finished))
        if last_sequence:
            self.over.set()

    def fail(self, message: str) -> None:
        self.events.append(message)
        self.over.set()

    def end(self) -> None:
        self.events.append("end")
        self.over.set()

    def is_cancelled(self) -> bool:
        return self.cancelled


@pytest.fixture
def runtime() -> ScriptedRuntime:
    return ScriptedRuntime()


@pytest.fixture
def reports() -> list[EngineStats]:
    return []


@pytest.fixture
def loop(runtime: ScriptedRuntime, reports: list[EngineStats]) -> Iterator[EngineLoop]:
    loop = EngineLoop(runtime, reports.append, lambda message: None, max_open=1000)
    loop.start()
    yield loop
    runtime.gate.set()
    loop.close()


def submit(loop: EngineLoop, new: int, request_id: str = "", sequences: int = 1) -> RecordingSink:
    sink = RecordingSink()
    request = RuntimeRequest(np.array([1]), new, num_sequences=sequences)
    loop.submit(ActiveRequest(request_id, request, sink))
    return sink


def finish(sink: RecordingSink) -> list[Any]:
    assert sink.over.wait(60), sink.events
    return sink.events


def test_a_request_whose_grammar_is_compiled_needs_no_step(loop, runtime, reports):
    """Before the fix, `llmops serve` killed a server that compiled grammars for two minutes."""
    preparation = SimpleNamespace(done=False, rejection="")
    runtime.prepare = lambda request: preparation
    sink = submit(loop, 3)
    wait_until(lambda: loop.state().waiting == 1)
    seen = len(reports)
    wait_until(lambda: len(reports) > seen)
    assert {(one.active, one.waiting) for one in reports} == {(0, 0)}
    preparation.done = True
    assert len(finish(sink)) == 3


def test_a_step_that_fails_answers_everyone_and_the_next_request_runs(loop, runtime):
    runtime.faults[2] = RuntimeError("out of luck")
    runtime.gate.clear()
    sinks = [submit(loop, 5), submit(loop, 5)]
    runtime.gate.set()
    for sink in sinks:
        assert finish(sink)[-1] == "the engine failed: out of luck"
    assert len(finish(submit(loop, 3))) == 3


def test_a_request_that_the_runtime_chokes_on_fails_alone(loop: EngineLoop, runtime: ScriptedRuntime) -> None:
    runtime.gate.clear()
    good, bad = submit(loop, 4), submit(loop, 13)
    runtime.gate.set()
    assert finish(bad) == ["the engine failed: unlucky"]
    assert [finished for *_, finished in finish(good)] == [False, False, False, True]


def test_failed_requests_write_one_line_a_second(loop: EngineLoop, monkeypatch) -> None:
    """Before the fix, each failed request wrote a line."""
    lines: list[str] = []
    now = [loop_module.time.monotonic()]
    monkeypatch.setattr(loop, "_log_error", lines.append)
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: now[0])
    for _ in range(20):
        finish(submit(loop, 13))
    now[0] += loop_module.LOG_PERIOD
    finish(submit(loop, 13))
    assert lines == [
        f"A request could not be started: unlucky{more}" for more in ("", " (19 more since the last such line)")
    ]


def test_one_refused_sequence_takes_the_others_of_its_request_along(loop: EngineLoop, runtime: ScriptedRuntime) -> None:
    runtime.refuse_from = 2
    assert finish(submit(loop, 5, sequences=3)) == ["num_return_sequences: too many"]
    assert not runtime.left


def test_a_cancelled_request_leaves_and_the_others_stay(loop: EngineLoop, runtime: ScriptedRuntime) -> None:
    leaving, staying = submit(loop, 10**9), submit(loop, 10**9, "stay")
    leaving.cancelled = True
    assert finish(leaving)[-1] == "end"
    assert len(runtime.left) == 1
    done = threading.Event()
    loop.stop_requests("stay", done.set)
    assert done.wait(60)
    assert finish(staying)[-1] == "end"
    assert not runtime.left


def test_a_full_queue_refuses_until_there_is_room(runtime: ScriptedRuntime) -> None:
    """Three sequences may run and wait; two are of one request. All are there before the first step."""
    loop = EngineLoop(runtime, lambda stats: None, lambda message: None, max_open=3)
    taken = [submit(loop, 5, sequences=2), submit(loop, 5)]
    refused = [submit(loop, 5), submit(loop, 5, sequences=2)]
    loop.start()
    try:
        assert [finish(sink) for sink in refused] == [[QUEUE_FULL_MESSAGE]] * 2
        assert [len(finish(sink)) for sink in taken] == [10, 5]
        assert len(finish(submit(loop, 5, sequences=4))) == 20
    finally:
        loop.close()


def test_the_last_report_says_that_all_is_idle(loop: EngineLoop, reports: list[EngineStats]) -> None:
    finish(submit(loop, 3))
    wait_until(lambda: reports and reports[-1].active == 0 and reports[-1].iteration == 3)
    assert reports[-1].kv_blocks_used == 0


def test_a_runtime_that_is_dead_ends_its_requests_and_refuses_the_next(loop, runtime):
    runtime.faults[2] = DeadEngineError("worker 3 is gone")
    runtime.gate.clear()
    sinks = [submit(loop, 5), submit(loop, 5)]
    runtime.gate.set()
    sentence = "engine: it has ended and takes no requests (worker 3 is gone)"
    assert [finish(sink)[-1] for sink in sinks] == [sentence, sentence]
    assert loop.failure == sentence
    assert finish(submit(loop, 3)) == [sentence]
    done = threading.Event()
    loop.stop_requests("nobody", done.set)
    assert done.wait(60)


def test_step_streams_hear_of_the_end_of_an_engine_whose_cache_cannot_be_asked(loop, runtime, monkeypatch):
    """A worker process that is killed while it is idle ends at the first question for its events."""
    flushed = threading.Event()

    def dead() -> list[KvCacheEvent]:
        raise DeadEngineError("its process ended with code -9")

    def after_step(idle: bool) -> float:
        list(loop.take_kv_events())
        flushed.set()
        return 0.05

    monkeypatch.setattr(runtime, "take_kv_events", dead)
    loop.after_step = after_step
    sentence = "engine: it has ended and takes no requests (its process ended with code -9)"
    assert finish(submit(loop, 3))[-1] == sentence
    assert flushed.wait(10)


def test_a_thread_that_dies_of_a_bug_leaves_no_request_hanging(runtime: ScriptedRuntime) -> None:
    said: list[str] = []
    loop = EngineLoop(runtime, lambda stats: None, said.append, max_open=1000)
    loop.after_step = lambda idle: 1 // (3 - runtime.steps)
    loop.start()
    try:
        sinks = [submit(loop, 50), submit(loop, 50)]
        sentence = "engine: it has ended and takes no requests (ZeroDivisionError: integer division or modulo by zero)"
        assert [finish(sink)[-1] for sink in sinks] == [sentence, sentence]
        assert finish(submit(loop, 1)) == [sentence]
    finally:
        loop.close()
    assert said[0] == "the engine has ended: ZeroDivisionError: integer division or modulo by zero"


# -- Tests of the gauges for each value that a runtime may not know


BLOCKS = "kv_cache_block_type"


def named(stats: EngineStats, label: str) -> dict[str, float]:
    return {value: number for (name, value), number in gauge_values(stats).items() if name == label}


def test_before_the_first_prompt_nothing_is_known_of_the_cache() -> None:
    stats = EngineStats(0, 0, 0, 0, 0, 0, kv_blocks_max=0, kv_blocks_used=0, tokens_per_block=0, max_requests=8)
    assert named(stats, BLOCKS) == {}
    assert named(stats, "memory_type") == {}
    assert named(stats, "request_type")["max"] == 8


def test_what_the_runtime_knows_is_all_told() -> None:
    stats = EngineStats(
        3, 2, 1, 1, 40, 9, 100, 25, 32, 8, kv_blocks_reused=7, paused=1, memory=(("gpu", 5), ("cpu", 6), ("pinned", 0))
    )
    assert named(stats, BLOCKS) == {
        "max": 100, "free": 75, "used": 25, "tokens_per": 32, "reused": 7, "fraction": 0.25,
    }  # fmt: skip
    assert named(stats, "memory_type") == {"gpu": 5, "cpu": 6, "pinned": 0}
    assert named(stats, "inflight_batcher_specific_metric") == {
        "total_context_tokens": 40, "generation_requests": 2, "micro_batch_id": 0, "paused_requests": 1,
    }  # fmt: skip


# -- The queues of the engine's grammars and of the gateway's texts: whoever brings many waits for them alone


NAMES = st.sampled_from(["a", "b", "a/x", "a/y", "c/x"])


@given(st.lists(NAMES, max_size=30))
def test_all_that_came_is_taken_once_and_each_s_own_in_order(names: list[str]) -> None:
    turns = RoundRobinQueue()
    for at, name in enumerate(names):
        turns.put(name.split("/"), (name, at))
    assert (turns.size, turns.waiting("a")) == (len(names), sum(name.split("/")[0] == "a" for name in names))
    taken = [turns.take() for _ in names]
    assert Counter(taken) == Counter((name, at) for at, name in enumerate(names))
    for name in set(names):
        assert [at for one, at in taken if one == name] == [at for at, one in enumerate(names) if one == name]
    with pytest.raises(IndexError):
        turns.take()


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 3))
def test_who_comes_later_waits_for_one_of_each_other(many: int, taken: int, others: int) -> None:
    turns = RoundRobinQueue()
    for other in range(others):
        for _ in range(many):
            turns.put([f"heavy{other}"], "heavy")
    for _ in range(min(taken, many * others)):
        turns.take()
    turns.put(["light"], "light")
    # whoever was served last goes behind those that came meanwhile
    assert "light" in [turns.take() for _ in range(min(others + (not taken), turns.size))]


def test_many_names_of_one_do_not_make_it_more() -> None:
    turns = RoundRobinQueue()
    for at in range(40):
        turns.put(["a", f"key{at}"], "heavy")
    turns.put(["b"], "light")
    assert "light" in [turns.take(), turns.take()]
