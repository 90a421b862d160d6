"""The judge of a canary. `python -m llmops.perf.lab canary_judge` measures it over thousands of roll-outs."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest

from llmops.control.rollouts.judge import CanaryJudge, JudgeSettings, RequestOutcome
from llmops.control.rollouts.sequential import BettingTest
from llmops.perf.lab.canary_judge import CAUGHT_WITHIN, FAULTS, STEPS, golden_verdict, simulate
from tests.support.waiting import Clock

SETTINGS = JudgeSettings(stable="v1", canary="v2", min_requests=100, min_seconds=10)


def outcomes(seed: int = 1, share: float = 0.2, **canary) -> Iterator[RequestOutcome]:
    """Requests of both versions without end; `canary` changes those of the canary."""
    dice = random.Random(seed)
    while True:
        times = {"ttft_s": 0.2 * dice.lognormvariate(0, 0.2), "tpot_s": 0.03 * dice.lognormvariate(0, 0.1)}
        counts = {"prompt_tokens": 100, "uncached_tokens": 100, "output_tokens": dice.randint(50, 150)}
        usual = RequestOutcome("v1", ok=True, **times, **counts)
        yield replace(usual, version="v2", **canary) if dice.random() < share else usual


def feed(judge: CanaryJudge, count: int, stream: Iterator[RequestOutcome]) -> None:
    """Hand over outcomes until there were `count` of the canary."""
    while count:
        outcome = next(stream)
        judge.observe(outcome)
        count -= outcome.version == "v2"


def judged(stream: Iterator[RequestOutcome]) -> CanaryJudge:
    clock = Clock()
    judge = CanaryJudge(SETTINGS, clock)
    feed(judge, 250, stream)
    clock.now += 11
    return judge


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("twin", [False, True])
def test_each_fault_is_found(fault: str, twin: bool):
    for seed in range(3):
        end = simulate(seed, fault, twin, STEPS[:1], CAUGHT_WITHIN)
        assert end.decision == "rollback", end


def test_a_healthy_version_is_promoted_although_its_cache_is_cold_and_the_load_swings():
    end = simulate(5, steps=(0.1, 0.5))
    assert end.decision == "promote", end
    assert max(end.requests) <= 800


@pytest.mark.parametrize("by_probability", [False, True])
def test_golden_prompts_find_a_loss_of_three_points(by_probability: bool):
    assert [golden_verdict(seed, 0.03, by_probability) for seed in range(20)].count("rollback") >= 18
    assert [golden_verdict(seed, 0.0, by_probability) for seed in range(20)].count("rollback") <= 1


def test_a_service_whose_answers_are_all_cut_at_max_tokens_can_be_promoted():
    """Classifiers and extractors ask for a few tokens: no answer can be cut more often than each."""
    verdict = judged(replace(one, finish_reason="length") for one in outcomes()).verdict()
    assert verdict.decision == "promote", verdict.reason
    assert [row.state for row in verdict.rows if row.metric == "cut"] == ["ok"]


def test_promotion_needs_requests_time_and_every_criterion():
    clock = Clock()
    judge = CanaryJudge(SETTINGS, clock)
    stream = outcomes()
    feed(judge, 50, stream)
    assert judge.decide() == ("continue", "50 of 100 requests of this step have ended.")
    feed(judge, 200, stream)
    assert judge.decide() == ("continue", "This step has run for 0 of 10 s.")
    clock.now = 11
    decision, reason = judge.decide()
    assert (decision, reason) == ("promote", "v2 is as good as v1 after 250 requests.")
    judge.begin_step()
    assert judge.decide() == ("continue", "0 of 100 requests of this step have ended.")


def test_without_requests_of_the_stable_version_there_is_no_verdict():
    judge = CanaryJudge(SETTINGS, Clock())
    assert judge.decide()[0] == "continue"
    assert {row.state for row in judge.verdict().rows} <= {"no data", "shown"}
    for outcome in outcomes(ok=False, share=1.0):
        judge.observe(outcome)
        if judge.verdict().rows[0].canary == 300:
            break
    decision, reason = judge.decide()
    assert decision == "continue"
    assert reason.startswith("No comparable requests of v1 yet for: errors")


def test_a_rollback_is_final_and_says_why():
    judge = judged(outcomes(ok=False))
    decision, reason = judge.decide()
    assert decision == "rollback"
    assert reason.startswith("errors: 100.0% of 250 requests of the canary failed, of the stable version 0.0% of ")
    feed(judge, 2000, outcomes(seed=2))
    judge.begin_step()
    assert judge.decide() == ("rollback", reason)
    assert [row.state for row in judge.verdict().rows if row.metric == "errors"] == ["worse"]


def test_an_incident_of_all_versions_is_not_the_canarys_fault():
    judge, dice = judged(outcomes()), random.Random(3)
    for outcome, _ in zip(outcomes(share=0.5), range(300), strict=False):
        judge.observe(replace(outcome, ok=dice.random() > 0.5))
    assert judge.decide()[0] != "rollback"


def test_a_slower_load_is_no_slower_version():
    judge = judged(outcomes())
    for outcome, _ in zip(outcomes(share=0.5), range(2000), strict=False):
        judge.observe(replace(outcome, ttft_s=outcome.ttft_s * 3, tpot_s=outcome.tpot_s * 3))
    assert judge.decide()[0] == "promote"


def test_first_tokens_are_compared_with_prompts_of_the_same_uncached_length():
    dice = random.Random(4)
    cold = {"uncached_tokens": 4000, "ttft_s": 1.0}
    judge = CanaryJudge(SETTINGS, Clock())

    def observe(stream: Iterator[RequestOutcome], count: int) -> None:
        for outcome in islice(stream, count):
            # one in four prompts of the stable version is as cold as all of the canary's
            judge.observe(replace(outcome, **cold) if outcome.version == "v1" and dice.random() < 0.25 else outcome)

    observe(outcomes(**cold), 3000)
    assert judge.decide()[0] == "continue"
    rows = {row.metric: row for row in judge.verdict().rows}
    assert (rows["TTFT p95"].state, rows["TTFT p95"].note) == ("ok", "with as many uncached tokens")
    assert rows["TTFT p50"].stable == pytest.approx(rows["TTFT p50"].canary, rel=0.3)

    observe(outcomes(uncached_tokens=4000, ttft_s=2.0), 1500)
    decision, reason = judge.decide()
    assert (decision, reason[:4]) == ("rollback", "TTFT")


def test_a_twin_replaces_the_stable_version_for_latencies():
    judge = CanaryJudge(replace(SETTINGS, twin="v1-twin"), Clock())
    for at, outcome in zip(range(1500), outcomes(share=0.4, ttft_s=0.6), strict=False):
        # the cold twin is as slow as the canary, the warm version is not
        judge.observe(replace(outcome, version="v1-twin", ttft_s=0.6) if at % 3 == 0 else outcome)
    assert judge.decide()[0] == "continue"
    assert [row.note for row in judge.verdict().rows if row.metric == "TTFT p95"] == ["the twin"]


def test_sweeps_of_golden_prompts_are_paired_by_prompt():
    judge = judged(outcomes())
    right = {str(at): 1.0 for at in range(40)}
    judge.observe(RequestOutcome("v1", True, golden=right | {"only v1": 0.0}))
    judge.observe(RequestOutcome("v2", True, golden=right))
    assert judge.decide()[0] == "promote"
    # two of 40 can be chance, but hold the roll-out
    judge.observe(RequestOutcome("v2", True, golden=right | {"0": 0.0, "1": 0.0, "2": 0.0}))
    judge.observe(RequestOutcome("v1", True, golden=right))
    assert judge.decide() == ("continue", "The canary is not yet shown to be as good as v1 in: golden prompts.")
    judge.observe(RequestOutcome("v1", True, golden=right))
    judge.observe(RequestOutcome("v2", True, golden=dict.fromkeys(right, 0.0)))
    decision, reason = judge.decide()
    assert decision == "rollback"
    assert reason.startswith("golden prompts: the mean score of 40 prompts is 0.000, of the stable version 1.000")


def test_a_test_by_betting_keeps_its_probability_of_a_false_alarm():
    dice, alarms = random.Random(6), 0
    for _ in range(400):
        test = BettingTest(0.05)
        for _ in range(300):
            test.observe(dice.random() < 0.05, 0.05)
        alarms += test.is_worse
    assert alarms <= 20 + 13, "5 % of 400, and three standard deviations"
