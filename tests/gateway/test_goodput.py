"""Each answer is counted once, by how it ended and whether it kept the model's objectives."""

import asyncio
import re
from time import perf_counter

import pytest

from llmops.gateway.interfaces import Usage
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry.metrics import GOODPUT_OUTCOMES, AnswerMeter, GatewayMetrics, LatencyObjectives
from tests.support.gateway_stack import END, running
from tests.support.scripted_triton import Step
from tests.support.waiting import eventually, stop_tasks

STRICT = LatencyObjectives(ttft=0.5, tpot=0.05)


@pytest.mark.parametrize(
    ("ttft", "tpot", "left", "outcome"),
    [
        (0.5, 0.05, False, "good"), (0.51, 0.01, False, "late"), (0.1, 0.051, False, "slow"),
        (9.0, 9.0, False, "late"), (0.1, None, False, "good"), (0.1, 0.01, True, "aborted"),
        (0.51, None, True, "late"), (0.1, 0.06, True, "slow"),
    ],
)  # fmt: skip
def test_an_answer_is_judged_by_its_own_times(ttft, tpot, left, outcome):
    assert STRICT.judge(ttft, tpot, left=left) == outcome


async def told(stack, metric: str) -> dict[str, float]:
    """The numbers of a metric of `tiny` by its last label."""
    text = (await stack.client.get("/metrics")).text
    return {label: float(count) for label, count in re.findall(rf'^{metric}="(\w+)"\}} (\S+)$', text, re.M)}


async def counted(stack, **expected: float) -> None:
    async def are_told() -> bool:
        found = await told(stack, r'llmops_answers_total\{model="tiny",outcome')
        return {outcome: count for outcome, count in found.items() if count} == expected

    await eventually(are_told)


def waiting(stack):
    return told(stack, r'llm_queue_depth\{model="tiny",priority')


async def test_first_token_after_the_objective_is_late_and_the_queue_is_seen(card, tokenizer):
    async with running(card, tokenizer, slo={"ttft_p95": "20ms"}) as stack:
        stack.say("Hello", wait=0.15)
        answer = asyncio.create_task(stack.chat())
        await eventually(lambda: stack.triton.active == 1)
        assert await waiting(stack) == {"default": 1.0}
        assert (await answer).status_code == 200
        assert await waiting(stack) == {"default": 0.0}
        await counted(stack, late=1)


async def test_a_models_own_objective_wins_and_slow_tokens_are_slow(card, tokenizer):
    models = {"tiny": {"slo": {"ttft_p95": "60s", "tpot_p95": "10ms"}}}
    async with running(card, tokenizer, slo={"ttft_p95": "1ms"}, models=models) as stack:
        ids = stack.tokenizer.encode("Hello")
        # the wait is before each step: the second token comes well after the first
        stack.steps(Step((ids[0],)), Step((ids[0],), wait=0.1), Step((END,)), Step(final=True))
        await stack.chat()
        await counted(stack, slow=1)


async def test_failures_and_refusals_are_told_apart(card, tokenizer):
    async with running(card, tokenizer) as stack:
        stack.steps(Step(error="the engine broke"))
        assert (await stack.chat()).status_code == 500
        await counted(stack, failed=1)
        # what the client did wrong is no failure of the service
        assert (await stack.chat(max_tokens=100_000)).status_code == 400
        stack.say("Hello")
        assert (await stack.chat()).status_code == 200
        await counted(stack, failed=1, good=1)


async def test_what_finds_no_place_was_shed(card, tokenizer):
    async with running({**card, "max_batch_size": 1}, tokenizer, limits={"queued": 0}) as stack:
        stack.triton.script = lambda tensors: [Step(wait=30.0)]
        first = asyncio.create_task(stack.chat())
        await eventually(lambda: stack.triton.active == 1)
        assert (await stack.chat()).status_code == 503
        await counted(stack, shed=1)
        first.cancel()


async def test_a_deadline_that_the_client_chose_counts_for_no_objective(card, tokenizer):
    """Before the fix, one caller's deadlines of 1 ms paged for the goodput and availability of all."""
    async with running({**card, "max_batch_size": 1}, tokenizer, tiers={"standard": {"max_wait": "60s"}}) as stack:
        stack.triton.script = lambda tensors: [Step(wait=30.0)]
        first = asyncio.create_task(stack.chat())
        await eventually(lambda: stack.triton.active == 1)
        headers = {"x-llm-d-slo-ttft-ms": "1"}
        refused = await stack.client.post("/v1/chat/completions", json=stack.chat_body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        await counted(stack)
        first.cancel()


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_in_time_aborted(card, tokenizer, streaming):
    async with running(card, tokenizer, slo={"ttft_p95": "60s"}) as stack:
        stack.triton.script = lambda tensors: [Step(wait=30.0)]
        task = asyncio.create_task(stack.chat(stream=streaming))
        await eventually(lambda: stack.triton.active == 1)
        await stop_tasks(task)
        await counted(stack, aborted=1)


def samples(metrics: GatewayMetrics) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *one.labels.values()): one.value for family in metrics.registry.collect() for one in family.samples
    }


def test_tokens_of_several_sequences_come_side_by_side():
    """Four answers to one prompt, each token 10 ms after the last of its answer: TPOT is 10 ms, not 2.5."""
    metrics = GatewayMetrics()
    meter = AnswerMeter(metrics.model("tiny"), perf_counter())
    meter.submitted(5, 4)
    meter.tokens(4)
    meter.first, meter.total, meter.last = 100.0, 404, 101.0
    meter.end(Usage(5, 404), "stop")
    assert samples(metrics)["llm_tpot_ms_sum", "tiny"] == pytest.approx(10.0)


def test_each_objective_of_a_tier_counts_its_own_requests():
    objectives = {"ttft_p50": "100ms", "ttft_p99": "700ms", "availability": "99.9%"}
    own = {"tiers": {"interactive": {"ttft_p99": "300ms", "e2e_p95": "2s"}}}
    settings = GatewaySettings(tiers={"interactive": {}, "standard": {}}, slo=objectives | own)
    metrics = GatewayMetrics(settings.objectives_of)
    for ttft in (0.05, 0.2, 0.5):
        for tier in ("interactive", "standard"):
            meter = AnswerMeter(metrics.model("tiny"), perf_counter() - 1.0, tier)
            meter.submitted(5, 1)
            meter.tokens(1)
            meter.first = meter.last = meter._started + ttft
            meter.end(Usage(5, 1), "stop")
    AnswerMeter(metrics.model("tiny"), perf_counter(), "interactive").refused("shed")
    AnswerMeter(metrics.model("tiny"), perf_counter(), "interactive").refused("aborted")
    AnswerMeter(metrics.model("tiny"), perf_counter() - 9.0, "standard").refused("aborted")
    counts = {key[2:]: value for key, value in samples(metrics).items() if key[0] == "llmops_slo_requests_total"}
    found = {key: (counts[*key, "met"], counts[*key, "missed"]) for key in {key[:2] for key in counts}}
    assert {key: pair for key, pair in found.items() if any(pair)} == {
        ("interactive", "ttft_p50"): (1, 2), ("interactive", "ttft_p99"): (2, 1), ("interactive", "e2e_p95"): (3, 0),
        ("interactive", "availability"): (3, 1), ("standard", "ttft_p50"): (1, 3), ("standard", "ttft_p99"): (3, 1),
        ("standard", "availability"): (4, 0),
    }  # fmt: skip
    assert samples(metrics)["llmops_slo_target_ratio", "tiny", "interactive", "availability"] == 0.999


def test_the_prefix_cache_counts_only_what_the_engine_told():
    metrics = GatewayMetrics()
    for cached in (None, 0, 48):
        meter = AnswerMeter(metrics.model("tiny"), perf_counter())
        meter.submitted(64, 1)
        meter.end(Usage(64, 1, 0, cached), "stop")
    found = samples(metrics)
    counts = [found[f"llmops_{kind}_tokens_total", "tiny"] for kind in ("prompt", "prefix_lookup", "prefix_cached")]
    assert counts == [192, 128, 48]


def test_a_scrape_finds_every_outcome_of_a_model_at_once():
    """A rate of a series that is not there is nothing, and an alert on it is silent."""
    metrics = GatewayMetrics()
    metrics.model("tiny")
    assert {key[2] for key in samples(metrics) if key[0] == "llmops_answers_total"} == set(GOODPUT_OUTCOMES)
