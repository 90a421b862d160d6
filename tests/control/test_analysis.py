"""Conditions of a roll-out in PromQL, asked of a real Prometheus."""

from collections.abc import Iterator

import httpx
import pytest

from llmops.control.rollouts import analysis
from llmops.control.rollouts.analysis import Analysis, AnalysisResult, Condition, check_conditions
from llmops.errors import InputError, ServerError
from tests.support.prometheus.server import prometheus

RATE = 'sum(rate(errors_total{model="m"}[5m]))'
CONDITIONS = {"up < 1": ("up", "<", 1), f"{RATE} <= 1e-3": (RATE, "<=", 0.001), "a==1": ("a", "==", 1)}
CONDITIONS |= {"a / (b > 0) >= bool .5": ("a / (b > 0)", ">=", 0.5), "a\n  != -2.5": ("a", "!=", -2.5)}


@pytest.mark.parametrize("text", CONDITIONS)
def test_a_condition_ends_in_a_comparison(text):
    assert Condition.parse(text) == Condition(*CONDITIONS[text])


@pytest.mark.parametrize("text", ["", "up", "up <", "< 1", "up < other", "up = 1", "1 < up"])
def test_anything_else_is_rejected(text):
    with pytest.raises(InputError, match="comparison with a number"):
        Condition.parse(text)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    try:
        with prometheus({}, []) as running:
            yield running.url
    except ServerError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("conditions", "state", "reason"),
    [
        (["vector(0.5) < 0.9", "scalar(vector(2)) == 2"], "passed", ""),
        (["vector(0.5) > 0.9"], "failed", "the value is 0.5"),
        (['label_replace(vector(1), "a", "b", "", "") or vector(3) < 2'], "failed", "the value is 3"),
        (["nothing_of_this_name < 1"], "no data", "no value of 'nothing_of_this_name'"),
        (["vector(0) / 0 < 1"], "no data", "no value"),
        (["sum( < 1"], "no data", "rejects"),
        # a failure outweighs missing data
        (["nothing_of_this_name < 1", "vector(1) < 1"], "failed", "the value is 1"),
    ],
)
async def test_conditions_of_a_real_prometheus(server, conditions, state, reason):
    async with httpx.AsyncClient(base_url=server) as client:
        found = await check_conditions(client, [Condition.parse(one) for one in conditions])
    assert found.state == state, found
    assert reason in found.reason


async def test_without_prometheus_there_is_no_verdict():
    condition = [Condition.parse("up == 1")]
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as client:
        found = await check_conditions(client, condition)
    assert (found.state, "does not answer (ConnectError)" in found.reason) == ("no data", True)
    for body in ("<html>", "[]", '{"status": "success", "data": {}}'):
        transport = httpx.MockTransport(lambda request, body=body: httpx.Response(200, text=body))
        async with httpx.AsyncClient(base_url="http://elsewhere", transport=transport) as client:
            found = await check_conditions(client, condition)
        assert (found.state, "not answer like Prometheus" in found.reason) == ("no data", True)


async def test_prometheus_is_asked_once_per_interval(monkeypatch):
    asked, now = [], [100.0]

    async def check(client, conditions):
        asked.append(now[0])
        return AnalysisResult("failed", "it is")

    monkeypatch.setattr(analysis, "check_conditions", check)
    watch = Analysis("http://prometheus:9090", ["up == 1"], lambda: now[0])
    for at in (100.0, 101.0, 116.0, 3.0):
        now[0] = at
        assert (await watch.check()).state == "failed"
    # also after a clock that went backwards
    assert asked == [100.0, 116.0, 3.0]
    assert await Analysis("", [], lambda: 0.0).check() == AnalysisResult("passed")
