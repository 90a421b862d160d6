"""Lengths, arrivals and what sessions say."""

import json
import random
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError
from llmops.perf.load.runner import arrival_times
from llmops.perf.records import Record
from llmops.perf.workloads.files import PromptFile, TraceWorkload, read_trace
from llmops.perf.workloads.filler import TokenIdFiller, WordFiller
from llmops.perf.workloads.lengths import parse_lengths
from llmops.perf.workloads.synthetic import SyntheticSpec, SyntheticWorkload


def draws(text, count=20_000):
    lengths, rng = parse_lengths(text), random.Random(1)
    return [lengths.draw(rng) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("128", 128),
        ("uniform:50,150", 100),
        ("normal:500,50", 500),
        ("exponential:300", 300),
        # mean of a log-normal: median times exp(sigma² / 2)
        ("lognormal:200,0.5", 200 * 1.1331),
        ("choice:10@0.75,1010@0.25", 260),
    ],
)
def test_lengths_have_the_mean_of_their_distribution(text, mean):
    values = draws(text)
    assert min(values) >= 1
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "many", "uniform:5", "uniform:9,3", "normal:1", "lognormal:0,1", "choice:", "gamma:1,2"]
)
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(InputError, match=r"is invalid|at least 1"):
        parse_lengths(text)


@pytest.mark.parametrize(("kind", "variation"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 2.0)])
def test_arrivals_have_the_rate_and_the_spread_asked_for(kind, variation):
    times = list(islice(arrival_times(kind, 40.0, random.Random(3)), 30_000))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 40, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.05, abs=1e-6)
    assert all(gap >= 0 for gap in gaps)


def requests(shape, sessions=4, filler=None):
    workload = SyntheticWorkload(shape, filler or WordFiller())
    return [workload.session(index).next(None) for index in range(sessions)]


def shape(**given):
    return SyntheticSpec(**{"input": parse_lengths("20"), "output": parse_lengths("10"), **given})


@given(st.integers(0, 1000), st.integers(1, 300))
def test_a_prompt_has_exactly_the_words_asked_for(index, length):
    request = SyntheticWorkload(shape(input=parse_lengths(str(length))), WordFiller()).session(index).next(None)
    assert len(request.messages[-1]["content"].split()) == length


def test_the_same_seed_gives_the_same_prompts_and_another_one_others():
    assert requests(shape(seed=1)) == requests(shape(seed=1))
    assert requests(shape(seed=1)) != requests(shape(seed=2))
    texts = [request.messages[-1]["content"] for request in requests(shape(), 50)]
    assert len(set(texts)) == 50


def test_a_conversation_repeats_what_was_said_and_ends_after_its_turns():
    session = SyntheticWorkload(shape(turns=parse_lengths("3")), WordFiller()).session(0)
    request, said = session.next(None), []
    for turn in range(3):
        assert [message["content"] for message in request.messages[:-1]] == said
        assert [message["role"] for message in request.messages] == ["user", "assistant"] * turn + ["user"]
        said += [request.messages[-1]["content"], f"answer {turn}"]
        request = session.next(Record(0, text=f"answer {turn}"))
    assert request is None


def write_lines(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path):
    path = write_lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 7, "hash_ids": [1, 2]},
    )
    entries = read_trace(path)
    assert [(entry.at, entry.output_length) for entry in entries] == [(1.0, 7), (3.0, 5)]
    trace = TraceWorkload(entries, TokenIdFiller(5000), "prompt", seed=0)
    short, long = (trace.session(index).next(None).prompt for index in range(2))
    assert (len(short), len(long)) == (1024, 1100)
    assert long[:1024] == short


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: not a JSON object"),
        ({"timestamp": 1, "input_length": 4}, "line 3: timestamp"),
        ({"timestamp": -1, "input_length": 4, "output_length": 1}, "line 3: the time must be at least 0"),
    ],
)
def test_a_broken_trace_names_the_line(tmp_path, line, message):
    good = {"timestamp": 0, "input_length": 4, "output_length": 1}
    with pytest.raises(InputError, match=message):
        read_trace(write_lines(tmp_path / "trace.jsonl", good, "", line))


def test_prompts_come_from_json_lines_and_plain_lines(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "a"}]}, {"prompt": "b"})
    prompts = PromptFile(path, parse_lengths("4"), "chat", 0)
    assert [prompts.session(i).next(None).messages[0]["content"] for i in range(3)] == ["a", "b", "a"]
    plain = PromptFile(write_lines(tmp_path / "p.txt", "eins", "zwei"), parse_lengths("4"), "prompt", 0)
    assert plain.session(1).next(None).prompt == "zwei"
    with pytest.raises(InputError, match="chat endpoint"):
        PromptFile(path, parse_lengths("4"), "prompt", 0)
