"""Autoscaling by the chart's rules: Kubernetes' algorithm by hand, and whole fleets in simulated time."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.errors import InputError
from llmops.perf.simulate.arrivals import ConversationArrivals
from llmops.perf.simulate.autoscaler import Autoscaler, AutoscalingSpec
from llmops.perf.simulate.engine import EngineSpec, LinearStepTimes
from llmops.perf.simulate.fleet import FleetSpec, SimulatedFleet, SimulationOutcome
from tests.support.commands import llmops

RULE = AutoscalingSpec(1, 20, {"waiting": 8.0})


def followed(sums: list[float], rule: AutoscalingSpec = RULE, current: int = 1) -> list[int]:
    """Return the number of replicas after each evaluation."""
    scaler, counts = Autoscaler(rule), []
    for at, total in enumerate(sums):
        current = scaler.replicas(at * rule.period, current, {"waiting": total})
        counts.append(current)
    return counts


def test_what_is_asked_for_is_the_sum_over_a_replicas_share_rounded_up():
    assert [followed([total])[0] for total in (0, 8, 8.7, 8.9, 16)] == [1, 1, 1, 2, 2]
    assert [followed([total], current=9)[0] for total in (80, 88, 120)] == [10, 11, 15]


def test_up_it_doubles_each_minute_at_most():
    assert followed([1000.0] * 13) == [2] * 4 + [4] * 4 + [8] * 4 + [16]


def test_down_it_goes_after_ten_quiet_minutes_one_by_one():
    counts = followed([80.0] + [8.0] * 80, current=10)
    # 40 looks are ten minutes, 8 are two
    assert counts == [10] * 40 + [9] * 8 + [8] * 8 + [7] * 8 + [6] * 8 + [5] * 8 + [4]


@given(st.lists(st.floats(0, 10_000), min_size=1, max_size=200), st.integers(1, 20))
def test_it_stays_within_its_bounds_and_its_pace(sums, current):
    counts = [current, *followed(sums, current=current)]
    assert all(1 <= count <= 20 for count in counts)
    # of the most that there were within the last minute
    assert all(after <= 2 * max(counts[max(at - 4, 0) : at + 1]) for at, after in enumerate(counts[1:]))
    # the window: nothing is taken away within ten minutes of asking for it
    falls = [at for at, (before, after) in enumerate(pairwise(counts)) if after < before]
    assert all(counts[at] - counts[at + 1] == 1 for at in falls)
    assert all(later - at >= 8 for at, later in pairwise(falls))


# Everything five times as fast as in a cluster; a replica that keeps up with 2 requests/s, before its cache is full
FAST = AutoscalingSpec(
    1, 12, {"waiting": 8.0, "kv": 0.8}, period=3, up_period=12, down_period=24, window=120, cold_start=36,
)  # fmt: skip
STEPS = LinearStepTimes(0.02, 0.0002, 0.00002)
ENGINE = EngineSpec(STEPS, blocks=1200, block_tokens=100, max_batch_size=64, gpus=2, price=3.0)


def simulated(scaling: AutoscalingSpec, rate: float, seconds: float, **more: float) -> SimulationOutcome:
    load = ConversationArrivals(rate, seconds, block_tokens=100, seed=3, **more)  # type: ignore[arg-type]
    return SimulatedFleet(FleetSpec(ENGINE, scaling.most, scaling=scaling)).run(load.arrivals())


def late(outcome: SimulationOutcome) -> int:
    """Requests whose first token took over half a second, once it has begun."""
    return sum(job.arrived > 600.0 and job.first - job.arrived > 0.5 for job in outcome.jobs)


def test_at_constant_load_it_comes_to_rest():
    outcome = simulated(replace(FAST, targets={**FAST.targets, "requests": 2.0}), 2.6, 1500.0)
    # 2.6 / 2 rounded up
    assert [count for when, count in outcome.scaled if when <= 1500.0] == [1, 2]
    assert late(outcome) == 0


def test_it_is_a_flag_of_simulate(tmp_path):
    pytest.importorskip("llmops.build.plan.build_plan")
    plan, options = tmp_path / "plan.json", ("--gpu", "h100-sxm", "--timing", "roofline")
    llmops("plan", "meta-llama/Llama-3.1-8B-Instruct", *options, "--save", plan)
    command = ("simulate", "--plan", plan, "--rate", "1", "-d", "60s")
    assert "2 at 0 s" in llmops(*command, "--scale", "2..3", "--json", tmp_path / "run.json").output
    found = json.loads((tmp_path / "run.json").read_text())["options"]["simulated"]
    assert found["scaled"] == [[0.0, 2]]
    for wrong in ("2", "0..3", "3..2", "1..1000"):
        with pytest.raises(InputError, match=r"write MIN\.\.MAX"):
            llmops(*command, "--scale", wrong)
