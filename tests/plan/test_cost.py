"""Money by hand."""

from __future__ import annotations

import pytest

from llmops.build.plan.search.serving_cost import ApiPrice, fleet_cost
from llmops.build.plan.speed.replica_model import OperatingPoint
from llmops.build.plan.speed.workload import PlanWorkload

POINT = OperatingPoint(10, 2.0, 0.1, 0.2, 0.02, 0.03, prefill_share=0.25, tokens_per_second=400, gpus=4)


def test_a_fleet_of_8_at_2_dollars():
    """$16/h; 2 requests/s are 7.2 M input and 1.44 M output tokens an hour; a quarter of the time goes to prompts."""
    cost = fleet_cost(2.0, 8, 2.0, 4.0, POINT, PlanWorkload(1000, 200), None)
    assert cost.hourly == 16
    assert cost.input_per_million == pytest.approx(16 * 0.25 / 7.2)
    assert cost.output_per_million == pytest.approx(16 * 0.75 / 1.44)
    # 7200 requests an hour
    assert cost.request == pytest.approx(16 / 7200)
    spent = 7.2 * cost.input_per_million + 1.44 * cost.output_per_million
    assert spent == pytest.approx(16)


def test_break_even():
    """A request costs 1000 x $1 + 200 x $5 per million = $0.002; $16/h buy 8000 of them, 2.22 a second."""
    cost = fleet_cost(2.0, 8, 2.0, 4.0, POINT, PlanWorkload(1000, 200), ApiPrice(1.0, 5.0))
    assert cost.break_even_rate == pytest.approx(8000 / 3600)
    assert cost.break_even_tokens_per_day == pytest.approx(8000 * 24 * 1200)


def test_no_break_even_beyond_the_capacity():
    cheap = fleet_cost(2.0, 8, 2.0, 4.0, POINT, PlanWorkload(1000, 200), ApiPrice(0.1, 0.1))
    assert cheap.break_even_rate is None


def test_a_month_has_730_hours():
    """A year of 365 days has 8760 hours; three GPUs at $2.49 cost $7.47 an hour and $5,453.10 a month."""
    cost = fleet_cost(2.49, 3, 2.0, 4.0, POINT, PlanWorkload(1000, 200), None)
    assert cost.monthly == pytest.approx(5453.10)


def test_a_fleet_that_breaks_even_at_full_load():
    """$16/h against $0.008 a request: 2000 requests an hour, which is all that this fleet can do."""
    cost = fleet_cost(2.0, 8, 0.5, 2000 / 3600, POINT, PlanWorkload(1000, 200), ApiPrice(4.0, 20.0))
    assert cost.break_even_rate == pytest.approx(2000 / 3600)
