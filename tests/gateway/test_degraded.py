"""Degraded mode: levels with hysteresis, what each takes away, and the switch by hand."""

import asyncio
import os
from itertools import pairwise

import pytest

from llmops.gateway.routing.admission import degradation as rules
from llmops.gateway.routing.admission.admission_controller import AdmissionLimits
from llmops.gateway.routing.admission.degradation import Degradation, DegradationRules, DegradationState, DegradedLevel
from llmops.gateway.routing.admission.tiered_queue import PriorityTier
from llmops.perf.simulate.arrivals import ConversationArrivals
from llmops.perf.simulate.engine import EngineSpec, LinearStepTimes
from llmops.perf.simulate.fleet import FleetSpec, SimulatedFleet
from tests.support.gateway_stack import running

RULES = DegradationRules(max_tokens=64, prompt_tokens=500, first_tier="interactive")


def levels(saturations: list[tuple[float, float]]) -> list[int]:
    """Return the level after each second of (seconds, saturation)."""
    state, now, found = DegradationState(0.0), 0.0, []
    for seconds, saturation in saturations:
        for _ in range(int(seconds)):
            now += 1.0
            found.append(int(state.update(saturation, now)))
    return found


def test_levels_rise_one_by_one_and_fall_slower():
    found = levels([(60, 1.0), (200, 0.0)])
    changes = [(at, level) for at, level in enumerate(found) if at and level != found[at - 1]]
    assert [level for _, level in changes] == [1, 2, 3, 4, 3, 2, 1, 0]
    rises, falls = [at for at, _ in changes[:4]], [at for at, _ in changes[4:]]
    assert all(later - earlier >= rules.RISE_SECONDS for earlier, later in pairwise(rises))
    assert all(later - earlier >= rules.FALL_SECONDS for earlier, later in pairwise(falls))


def test_a_burst_and_a_saturation_near_the_threshold_change_nothing():
    assert not any(levels([(3, 1.0), (30, 0.0), (3, 1.0)]))
    wobbling = [(1, rules.ENTER_SATURATION[0] + (0.1 if at % 2 else -0.1)) for at in range(600)]
    assert set(levels([(60, 0.6), *wobbling])[60:]) == {1}


def test_a_clock_that_jumps_back_does_not_change_the_level():
    state = DegradationState(100.0)
    for now in range(101, 160):
        state.update(1.0, now)
    assert (state.level, state.update(1.0, 50.0)) == (DegradedLevel.SHED, DegradedLevel.SHED)
    assert 0 <= state.saturation <= 1


@pytest.mark.parametrize(
    ("level", "tier", "prompt_tokens", "is_shed"),
    [(2, "batch", None, False), (3, "interactive", None, False), (3, "", 500, False), (4, "batch", 500, True)],
)
def test_lower_tiers_lose_more(level, tier, prompt_tokens, is_shed):
    limits = RULES.limits(DegradedLevel(level), tier)
    assert (limits.max_tokens, limits.prompt_tokens, limits.is_shed) == (64, prompt_tokens, is_shed)


def test_an_operators_file_wins_until_it_goes(tmp_path):
    path = tmp_path / "level"
    changes: list[tuple[str, int]] = []
    degradation = Degradation(
        RULES, rules.LevelFile(path), lambda: 0.0, lambda model, level: changes.append((model, level))
    )
    for content, level in (("a: 3", 3), ("4", 4), ("a: 7", 0), ("[", 0)):
        path.write_text(content)
        degradation.update({"a": 0.0})
        assert degradation.level("a") == level, content
    # read after it was cut and before it was written, within one tick of the clock
    path.write_text("")
    degradation.update({"a": 0.0})
    cut = path.stat().st_mtime_ns
    path.write_text("1")
    os.utime(path, ns=(cut, cut))
    degradation.update({"a": 0.0})
    path.unlink()
    degradation.update({"a": 0.0})
    assert (degradation.level("a"), changes) == (0, [("a", 3), ("a", 4), ("a", 0), ("a", 1), ("a", 0)])


def simulated(degraded: DegradationRules | None) -> dict[str, float]:
    engine = EngineSpec(LinearStepTimes(0.02, 0.0005, 0.0001), 4000, max_batch_size=32)
    tiers = (PriorityTier("interactive", max_wait=2.0), PriorityTier("standard", max_wait=10.0))
    spec = FleetSpec(engine, 2, tiers=tiers, bounds=AdmissionLimits(), degraded=degraded)
    shares = (("interactive", 0.3), ("standard", 0.7))
    load = ConversationArrivals(rate=12.0, seconds=240.0, think=5.0, tiers=shares, tenants=4).arrivals()
    outcome = SimulatedFleet(spec).run(load)
    assert bool(outcome.degraded) == (degraded is not None)
    late = [job for job in outcome.jobs if job.arrived > 60]
    refused = {tier: [job.refused < 0 for job in late if job.tier == tier] for tier in ("interactive", "standard")}
    return {tier: sum(answered) / len(answered) for tier, answered in refused.items()}


def test_in_the_simulator_shorter_answers_serve_more_requests():
    plain, degraded = simulated(None), simulated(DegradationRules(64, 8192, "interactive"))
    assert degraded["interactive"] >= plain["interactive"]
    assert degraded["standard"] > plain["standard"] + 0.05, (plain, degraded)


async def test_a_gateway_cuts_answers_and_rejects_lower_tiers(card, tokenizer, tmp_path):
    path = tmp_path / "level"
    settings = {"tiers": {"interactive": {}, "standard": {}}, "degraded": {"max_tokens": 4, "file": str(path)}}
    async with running(card, tokenizer, **settings) as stack:
        stack.say("Hello")
        assert "x-llmops-degraded" not in (await stack.chat()).headers
        path.write_text("1")

        while (await stack.chat()).headers.get("x-llmops-degraded") != "1":
            await asyncio.sleep(0.01)
        await stack.chat(max_tokens=100)
        assert stack.triton.requests[-1]["request_output_len"] == [4]
        path.write_text("4")
        while (answer := await stack.chat()).status_code != 503:
            await asyncio.sleep(0.01)
        assert answer.json()["error"]["code"] == "overloaded"
        assert "serves only requests of the tier interactive now" in answer.json()["error"]["message"]
        assert 24 <= float(answer.headers["retry-after-ms"]) / 1000 <= 36
        assert answer.headers["x-llmops-degraded"] == "4"
        page = (await stack.client.get("/metrics")).text
        assert 'llmops_degraded_level{model="tiny"} 4.0' in page
        assert 'llmops_degraded_requests_total{effect="max_tokens",model="tiny"}' in page


def test_a_tenant_that_does_not_wait_is_kept_out_only_by_hand(tmp_path):
    file = tmp_path / "level"
    now = [0.0]
    degradation = Degradation(RULES, rules.LevelFile(file), lambda: now[0])
    for _ in range(100):
        now[0] += 1.0
        degradation.update({"llama": 1.0})
    assert degradation.level("llama") == DegradedLevel.SHED

    def limits() -> list[tuple[int, bool]]:
        found = [degradation.limits("llama", "standard", waits) for waits in (lambda: True, lambda: False)]
        return [(one.max_tokens, one.is_shed) for one in found]

    assert limits() == [(64, True), (64, False)]
    file.write_text("4")
    degradation.update({"llama": 1.0})
    assert limits() == [(64, True), (64, True)]
