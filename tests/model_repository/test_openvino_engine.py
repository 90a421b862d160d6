"""The engine loop on the real pipeline: grammars are prepared beside the others' steps, and a step that fails takes
nobody along who comes later. The model has SmolLM2's vocabulary, as grammars see it, and hardly a layer."""

import contextlib
import gc
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

pytest.importorskip("openvino_genai")

from llmops_engine.engine_runtime import EngineRuntime
from llmops_engine.guided.sandbox import GrammarLimits, GrammarMeasurement, GrammarSandbox
from llmops_engine.guided.watchdog import sampler_threads
from llmops_engine.loop import ActiveRequest, EngineLoop
from llmops_engine.request import RuntimeRequest, RuntimeSamplingParams
from llmops_engine.runtimes import openvino as runtime_module
from llmops_engine.runtimes.chunk_size import MeasuredStep, largest_chunk, mean_seconds
from llmops_engine.runtimes.openvino import OpenVINOOptions, OpenVINORuntime

from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from tests.model_repository.test_loop import RecordingSink
from tests.support.tiny_models import write_checkpoint
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

PATIENCE = 300
#: Tokens that the model's context has room for, and tokens of an answer that outlasts any grammar.
LENGTH, LONG = 65_536, 30_000


def bounded(first: int, strings: int = 1) -> tuple[str, str]:
    """A schema that takes about a second of compilation per 100 characters that a string of it may have: `first` the
    first one, `first` + 1 the second, and so on, each length anew."""
    texts = {f"text{at}": {"type": "string", "maxLength": first + at} for at in range(strings)}
    return "json_schema", json.dumps({"type": "object", "properties": texts, "required": list(texts)})


class Sink(RecordingSink):
    """Counts what comes, and says when it first did and when it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.error: str | None = None
        self.arrivals: list[int] = []
        self.clock: Callable[[], int] = lambda: 0

    def add_tokens(self, sequence: int, ids: list[int], *rest: Any) -> None:
        self.ids += ids
        self.arrivals.append(self.clock())
        super().add_tokens(sequence, ids, *rest)

    def fail(self, message: str) -> None:
        self.error = message
        super().fail(message)

    def finish(self) -> "Sink":
        assert self.over.wait(PATIENCE), f"{len(self.ids)} tokens came, but no end"
        return self


class Engine:
    """A loop on the runtime, and requests for it."""

    def __init__(self, runtime: EngineRuntime, prompt: list[int]) -> None:
        self.runtime = runtime
        self.errors: list[str] = []
        self.prompt = prompt
        self.loop = EngineLoop(runtime, lambda stats: None, self.errors.append, max_open=1000)
        self.loop.start()

    def ask(self, new: int, guide: tuple[str, str] | None = None, sink: Sink | None = None, caller: str = "") -> Sink:
        sink = sink or Sink()
        request = RuntimeRequest(
            np.array(self.prompt), new, end_ids=frozenset([2]) if guide else frozenset(), guide=guide,
            sampling=RuntimeSamplingParams(temperature=0.0), caller=caller,
        )  # fmt: skip
        self.loop.submit(ActiveRequest("", request, sink))
        return sink


@pytest.fixture(scope="module")
def light_engine(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with SmolLM2's tokenizer whose steps take a millisecond or two."""
    root, sizes = tmp_path_factory.mktemp("light"), {"hidden_size": 64, "intermediate_size": 64}
    write_checkpoint(root / "light", "llama", vocab_size=49152, max_position_embeddings=LENGTH, **sizes)
    shutil.copytree(engine_dir / "tokenizer", root / "light", dirs_exist_ok=True)
    build(BuildSpec(str(root / "light"), root / "engine", max_num_tokens=512))
    return root / "engine"


@pytest.fixture(scope="module")
def tokenizer(engine_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(engine_dir / "tokenizer" / "tokenizer.json"))


@pytest.fixture
def start(light_engine: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []
    manifest = json.loads((light_engine / "engine.json").read_text())
    prompt = tokenizer.encode("Tell me about Paris.", add_special_tokens=False).ids

    def start(**limits: Any) -> Engine:
        own = manifest["extra"]["openvino"]
        options = OpenVINOOptions(
            light_engine / "model", 8, LENGTH, tokenizer.get_vocab_size(), 512, 2 * LENGTH, "CPU", {}, own["kv_cache"],
            GrammarLimits(**{"niceness": 0, **limits}),
        )  # fmt: skip
        engines.append(Engine(OpenVINORuntime(options), prompt))
        return engines[-1]

    yield start
    while engines:
        engines.pop().loop.close()
    # each engine maps its weights; the cycles in which it hangs would keep them until some later collection
    gc.collect()


def test_threads_of_an_engine_may_run_on_all_cores(start: Callable[..., Engine]) -> None:
    cores = os.sched_getaffinity(0)

    def pinned() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task") if os.sched_getaffinity(int(name)) != cores}

    # OpenVINO pins the threads of models that other tests of this process compiled
    of_others, seen = pinned(), set()
    stream = start().ask(LONG)
    while len(stream.ids) < 50:
        seen |= pinned()
    assert seen <= of_others


def test_others_go_on_while_a_slow_grammar_is_prepared(start, tokenizer, monkeypatch):
    engine = start()
    stream = engine.ask(LONG)
    guided = Sink()
    guided.clock = lambda: len(stream.ids)
    wait_until(lambda: len(stream.ids) >= 5)
    asked_at = len(stream.ids)
    engine.ask(12, bounded(100), guided).finish()
    # the grammar lets a model without sense begin with spaces
    assert tokenizer.decode(guided.ids).lstrip().startswith("{")
    assert guided.arrivals[0] - asked_at > 10, "the stream stood still while the grammar was compiled"
    assert stream.error is None
    again = Sink()
    again.clock = lambda: len(stream.ids)
    prepare, taken_at = engine.runtime.prepare, []

    def noted(request: RuntimeRequest) -> Any:
        taken_at.append(len(stream.ids))
        return prepare(request)

    monkeypatch.setattr(engine.runtime, "prepare", noted)
    engine.ask(12, bounded(100), again).finish()
    assert again.ids == guided.ids
    assert again.arrivals[0] - taken_at[0] <= 3, "a grammar that is known joins the next step"
    stream.cancelled = True
    stream.finish()


class QuickLane:
    """The kinds of grammars that the quick lane took, in order.

    It measures nothing before it is `let_go`.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.began = threading.Event()
        self.let_go = threading.Event()

    def take(self, kind: str) -> None:
        if threading.current_thread().name == "grammar":
            self.kinds.append(kind)
            self.began.set()
            assert self.let_go.wait(PATIENCE)


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[QuickLane]:
    lane, measure = QuickLane(), GrammarSandbox.measure

    def held(self: GrammarSandbox, guide: tuple[str, str], limits: GrammarLimits) -> GrammarMeasurement:
        lane.take(guide[0])
        return measure(self, guide, limits)

    monkeypatch.setattr(GrammarSandbox, "measure", held)
    yield lane
    lane.let_go.set()


def test_who_brings_many_heavy_grammars_waits_for_them_alone(start: Callable[..., Engine], lane: QuickLane) -> None:
    engine = start(compile_seconds=1)
    heavy = [engine.ask(8, bounded(250 + at, 30), caller="10.0.0.1") for at in range(20)]
    assert lane.began.wait(PATIENCE)
    quick = engine.ask(8, ("regex", "yes|no"), caller="10.0.0.2")
    engine.ask(8).finish()  # the engine has taken those before it
    lane.let_go.set()
    assert quick.finish().error is None
    assert lane.kinds.index("regex") == 1, "it waited only for the one that was being measured"
    assert lane.kinds.count("json_schema") == 1, "once one of them is slow, the others go to the slow lane"
    assert sum(sink.over.is_set() for sink in heavy) < 5
    for sink in heavy:
        sink.cancelled = True


def test_what_takes_too_long_is_refused_once_and_for_all(start: Callable[..., Engine]) -> None:
    engine = start(compile_seconds=1)
    stream = engine.ask(LONG)
    refusal = engine.ask(8, bounded(250, 30)).finish().error
    assert refusal == "guided_decoding_guide: the grammar takes more than 1 s to compile; simplify it"
    assert probes() == []
    assert engine.ask(8, bounded(250, 30)).finish().error == refusal
    assert probes() == [], "it is not tried again"
    assert engine.ask(8, ("regex", "yes|no")).finish().error is None
    assert stream.error is None


def test_a_grammar_that_is_slow_to_follow_is_refused(start: Callable[..., Engine]) -> None:
    refusal = start(token_seconds=1e-4).ask(8, bounded(60)).finish().error
    assert refusal is not None
    assert refusal.startswith("guided_decoding_guide: the grammar takes ")
    assert refusal.endswith(" ms per token to follow; simplify it")


def test_a_compiler_process_that_dies_takes_only_its_grammar_along(start: Callable[..., Engine]) -> None:
    engine = start()
    stream = engine.ask(LONG)
    killed = engine.ask(8, bounded(250, 30))
    while not killed.over.wait(0.01):
        for running in probes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(running, signal.SIGKILL)
    error = killed.error
    assert error == "guided_decoding_guide: the grammar could not be compiled: the process that compiles it ended"
    assert engine.ask(8, bounded(20)).finish().error is None, "a new process serves the next one"
    assert stream.error is None


def test_after_a_failed_step_everybody_hears_of_it_and_the_next_requests_are_served(start, monkeypatch):
    engine = start()
    expected = engine.ask(16).finish().ids
    # without the check beforehand, the pipeline itself compiles the grammar and fails in the middle of a step
    monkeypatch.setattr(engine.runtime, "prepare", lambda request: None)
    streams = [engine.ask(LONG), engine.ask(LONG)]
    wait_until(lambda: all(len(stream.ids) > 3 for stream in streams))
    culprit = engine.ask(8, ("regex", "[a-"))
    later = engine.ask(16)
    for sink in (culprit, *streams):
        assert str(sink.finish().error).startswith("the engine failed: ")
    for sink in (later, engine.ask(16), engine.ask(16)):
        assert sink.finish().ids in (expected, [])
    assert engine.ask(16).finish().ids == expected
    assert len(engine.errors) == 1


def test_the_memory_of_grammars_is_bounded_and_nobody_is_disturbed(start: Callable[..., Engine]) -> None:
    engine = start(total=0)  # any grammar fills it
    expected = engine.ask(32).finish().ids
    stream = engine.ask(LONG)
    wait_until(lambda: stream.ids)
    assert engine.ask(8, bounded(20)).finish().error is None
    first = engine.runtime._pipeline
    assert engine.ask(8, bounded(20)).finish().error is None, "what is compiled can be used"
    assert engine.runtime._pipeline is first
    assert engine.ask(8, bounded(21)).finish().error is None
    assert engine.runtime._pipeline is not first, "another pipeline, without what the first one had compiled"
    assert engine.ask(8, bounded(22)).finish().error == (
        "unavailable until older answers have ended: the engine is replacing its pipeline; retry later"
    )
    before = len(stream.ids)
    assert engine.ask(32).finish().ids == expected
    assert stream.error is None, "it goes on on the old one"
    assert before < len(stream.ids) < LONG
    stream.cancelled = True
    stream.finish()
    assert engine.ask(8, bounded(22)).finish().error is None
    assert engine.errors == []


def test_nothing_is_left_when_the_engine_closes_in_the_middle_of_a_compilation(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.ask(8, bounded(100, 2))
    wait_until(probes)
    engine.loop.close()
    assert probes() == []


def probes() -> list[int]:
    """Processes of this one that compile grammars."""
    own = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == os.getpid() and b"guided.sandbox" in (folder / "cmdline").read_bytes():
                own.append(int(folder.name))
    return own


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "2147483648\n", 2 << 30),
        ("memory.max", "max\n", 2**62),
        ("memory/memory.limit_in_bytes", "1073741824\n", 1 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 2**62),
        ("none", "", 2**62),
    ],
)
def test_the_default_cache_fits_into_the_container(tmp_path, monkeypatch, file, text, limit):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert runtime_module._container_memory(tmp_path) == limit
    monkeypatch.setattr(runtime_module, "_container_memory", lambda: 1 << 30)
    assert runtime_module._default_cache_bytes() == 256 << 20


# -- Long prompts are read in chunks that let running answers keep their pace


#: CPU milliseconds of SmolLM2-135M on two cores: the first and the last chunk of a prompt of 4,000 tokens, in chunks
#: of 256, 64, 16 and 4 tokens.
MEASURED = [(256, 250, 100), (256, 3750, 251), (64, 250, 39), (64, 3750, 90), (16, 250, 26), (16, 3750, 55)]


@pytest.mark.parametrize(
    ("objective", "least", "chunk"),
    [(1.0, 1, 256), (0.2, 1, 128), (0.1, 1, 64), (0.06, 1, 32), (0.001, 1, 32), (0.001, 100, 128), (0.001, 300, 256)],
)
def test_the_chunk_is_the_largest_whose_mean_step_keeps_the_objective(objective, least, chunk):
    steps = [MeasuredStep(tokens, depth, ms / 1000) for tokens, depth, ms in MEASURED]
    assert largest_chunk(steps, objective, 8192, 256, least) == chunk


def test_steps_of_one_size_are_enough_for_its_own_mean():
    steps = [MeasuredStep(tokens, depth, ms / 1000) for tokens, depth, ms in MEASURED if tokens == 64]
    assert mean_seconds(steps, 64, 8192) == pytest.approx(0.095, abs=0.001)


# too slow for any chunk, and fast enough for the largest one
@pytest.mark.parametrize(("step_seconds", "chunk"), [(None, 512), (1e-6, 32), (100.0, 512)])
def test_an_engine_measures_its_chunk_and_counts_down_what_is_left_of_a_prompt(light_engine, step_seconds, chunk):
    openvino: Any = pytest.importorskip("llmops_engine.runtimes.openvino")
    own = json.loads((light_engine / "engine.json").read_text())["extra"]["openvino"]
    options = openvino.OpenVINOOptions(
        light_engine / "model", 4, 2048, 49152, 512, 4096, "CPU", own["properties"], own["kv_cache"],
        prefix_cache=False, step_seconds=step_seconds,
    )  # fmt: skip
    with closing(openvino.OpenVINORuntime(options)) as runtime:
        runtime.submit(1, RuntimeRequest(np.arange(100, 110), 1000), 0)
        list(runtime.step())
        runtime.submit(2, RuntimeRequest(np.arange(100, 1600), 1), 0)
        left = []
        for _ in range(2):
            list(runtime.step())
            left.append(runtime.stats().context_tokens)
    # the answer that runs takes one token of each step
    assert left == [1500 - (chunk - 1), 1500 - 2 * (chunk - 1)]


def test_a_grammar_whose_answer_ends_in_its_slow_step_gets_no_other_refused(start, monkeypatch):
    """Before, whose `max_tokens` ended its answer in the slow step had the grammar of a neighbour rejected for good."""
    engine, slow, victims = start(), ("regex", "[a-z ]*"), ("regex", "[A-Z ]*")
    runtime: Any = engine.runtime
    engine.ask(4, slow).finish()
    engine.ask(4, victims).finish()

    def stop(sequences: int, expected: float | None) -> float:
        ends = [one.request.guide for one in runtime._sequences.values() if len(one.generated) == 19]
        return 1.0 if slow in ends and len(runtime._sequences) == 2 else 0.0

    monkeypatch.setattr(runtime._watchdog, "stop", stop)
    victim, attack = engine.ask(LONG, victims), engine.ask(20, slow)
    assert attack.finish().error is None
    told = victim.error
    victim.cancelled = True
    victim.finish()
    assert told is None or told.startswith("unavailable")
    assert engine.ask(4, victims).finish().error is None


def test_a_slow_grammar_is_ended_on_a_pipeline_that_replaced_another(start, monkeypatch):
    engine = start(token_seconds=0.02)
    engine.loop.post(engine.runtime._replace_pipeline)
    monkeypatch.setattr(engine.runtime, "prepare", lambda request: None)  # a trial would refuse the grammar
    slow = ("ebnf_grammar", "root ::= [a-z ] | [a-z ] root | [a-z ] root root")
    refusal = engine.ask(LONG, slow).finish().error
    assert refusal is not None
    assert refusal.startswith("guided_decoding_guide: the grammar takes too long, ")


def test_after_a_very_slow_step_all_new_grammars_of_its_caller_end_at_once(start, monkeypatch):
    """Before, they ended one by one: five took 2 s of CPU per step, in each of four steps."""
    engine = start()
    runtime: Any = engine.runtime

    def stop(sequences: int, expected: float | None) -> float:
        return 0.3 if sequences == 3 and all(one.started for one in runtime._sequences.values()) else 0.0

    monkeypatch.setattr(runtime._watchdog, "stop", stop)
    trusted = ("regex", "[A-Z ]*")
    for _ in range(3):
        engine.ask(1, trusted).finish()
    other = engine.ask(LONG, trusted, caller="other/user")
    mine = [engine.ask(LONG, ("regex", f"[{last}-z ]*"), caller=f"mine/{last}") for last in "ab"]
    assert {str(one.finish().error)[:11] for one in mine} == {"unavailable"}
    assert other.error is None
    assert [engine.ask(1, ("regex", f"[{last}-z ]*")).finish().error for last in "ab"] == [None, None]


# thread 1 is older than the pipeline and computes its model or rests, 2 and 3 sample, 4 is another of the model's
@pytest.mark.parametrize("used", [{1: 0.03}, {}, {4: 0.03}, {1: 0.03, 4: 0.03}])
def test_threads_that_sample_are_told_from_those_of_an_older_model(used):
    """Before, the busiest new thread counted as the model's: a replaced pipeline's sampler was not watched."""
    times = dict.fromkeys((1, 2, 3, *used), 1.0)
    after = {thread: 1.0 + ({2: 2e-4, 3: 5e-5} | used).get(thread, 0.0) for thread in times}
    assert sorted(sampler_threads([1], times, after, own=0.14)) == [2, 3]
