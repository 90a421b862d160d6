"""Workloads computed by hand, and inputs that are rejected."""

from __future__ import annotations

import pytest

from llmops.build.plan.speed.workload import PlanWorkload
from llmops.errors import InputError


def test_lengths():
    load = PlanWorkload(1000, 200, prefix_hit=0.25)
    assert (load.new_tokens, load.length) == (750, 1200)
    assert PlanWorkload(1000, 200).new_tokens == 1000
    assert PlanWorkload(10, 1, prefix_hit=0.99).new_tokens == 1


def test_tokens_of_a_step_with_drafts():
    """A draft counts if all before it were accepted: 1 + 0.5 + 0.25."""
    assert PlanWorkload(draft_tokens=2, acceptance=0.5).tokens_per_step == 1.75
    assert PlanWorkload(draft_tokens=1, acceptance=0.5).tokens_per_step == 1.5
    assert PlanWorkload(draft_tokens=4, acceptance=0.0).tokens_per_step == 1.0
    assert PlanWorkload(acceptance=0.5).tokens_per_step == 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"isl": 0}, "--isl 0: a length is at least 1 token"),
        ({"osl": 0}, "--osl 0: a length is at least 1 token"),
        ({"prefix_hit": 1.0}, "--prefix-hit 1: a share between 0 and 1"),
        ({"prefix_hit": -0.1}, "--prefix-hit -0.1: a share"),
        ({"acceptance": 1.0}, "--acceptance 1: a probability"),
        ({"acceptance": -0.5}, "--acceptance -0.5: a probability"),
        ({"qps": 0.0}, "--qps 0: a rate above 0"),
        ({"qps": -1.0}, "--qps -1: a rate above 0"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(InputError) as caught:
        PlanWorkload(**fields)
    assert words in caught.value.message


def test_the_least_that_is_taken():
    assert PlanWorkload(1, 1, qps=0.001, prefix_hit=0.0, acceptance=0.0).length == 2
    assert PlanWorkload(acceptance=0.999, draft_tokens=1).tokens_per_step == pytest.approx(1.999)


def test_what_is_planned_for_when_nothing_is_said():
    """docs/plan.md: prompts of 1000 tokens, answers of 200, no cache, no drafts, chunked prefill."""
    load = PlanWorkload()
    assert (load.isl, load.osl, load.new_tokens, load.tokens_per_step) == (1000, 200, 1000, 1.0)
    assert load.chunked_prefill
    assert PlanWorkload(draft_tokens=1).tokens_per_step == pytest.approx(1.7)
