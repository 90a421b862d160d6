"""Histograms that are told value by value and counted in bulk."""

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from llmops.gateway.telemetry.metric_series import HistogramSeries
from tests.support.waiting import eventually

BOUNDS = (0.1, 1.0, 2.5)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.2, 1.0, 2.5, 3.0]), st.integers(0, 3), st.booleans())))
def test_they_say_what_prometheus_own_say_whenever_they_are_counted(told) -> None:
    own, other = HistogramSeries(BOUNDS), Histogram("other", "…", buckets=BOUNDS, registry=CollectorRegistry())
    for value, times, settled in told:
        if times == 1:
            own.observe(value)
        else:
            own.observe_repeated(value, times)
        for _ in range(times):
            other.observe(value)
        if settled:
            own.settle()
    buckets, total = own.read()
    samples = [sample for metric in other.collect() for sample in metric.samples]
    assert buckets == [(one.labels["le"], one.value) for one in samples if one.name == "other_bucket"]
    assert math.isclose(total, next(one.value for one in samples if one.name == "other_sum"))


async def test_a_gateway_that_nobody_scrapes_counts_them_all_the_same(stack) -> None:
    stack.say("Paris")
    metrics = stack.server.config.app.state.metrics
    histograms = [metrics.stages.labels("parse"), metrics.model("tiny").itl]
    for _ in range(3):
        await stack.chat()
    await eventually(lambda: [sum(one._counts) > 2 and not one._fresh for one in histograms] == [True, True])
