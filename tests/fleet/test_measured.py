"""The state of a replica that reports none, from what a gateway sees of it."""

import random

import pytest

from llmops.gateway.routing.replicas.in_flight import InFlightRequest, InFlightTracker
from llmops.gateway.routing.replicas.load_estimator import EngineGauges, LoadEstimator
from tests.fleet.views import view

# of the engine that is measured: seconds per step, per sequence, per token in the cache, and per prompt token
STEP, SEQUENCE, CACHED, PROMPT = 0.01, 0.0004, 2e-7, 0.0001


class Engine:
    """An engine whose times are known, and a gateway that measures it. A step may read any number of prompts."""

    def __init__(self, noise: float = 0.0) -> None:
        self.view = view("r", prefill_rate=0.0, step_seconds=0.0, max_batch_size=64)
        self.in_flight = InFlightTracker(self.view)
        self.measured = LoadEstimator(self.view, self.in_flight)
        self.now, self.noise, self.rng = 0.0, noise, random.Random(1)
        self.waiting: list[InFlightRequest] = []
        self.running: list[InFlightRequest] = []

    def send(self, prompt: int, cached: int = 0) -> InFlightRequest:
        sent = self.in_flight.add(prompt - cached, is_counted=False, prompt=prompt)
        self.measured.record_sent(sent, self.now)
        self.waiting.append(sent)
        return sent

    def end(self, sent: InFlightRequest) -> None:
        self.running.remove(sent)
        self.measured.record_end(sent)

    def seconds(self, prompt_tokens: int = 0) -> float:
        context = sum(one.prompt + one.output for one in self.running)
        return STEP + SEQUENCE * len(self.running) + CACHED * context + PROMPT * prompt_tokens

    def step(self, stall: float = 0.0) -> None:
        read, self.waiting = self.waiting, []
        self.now += self.seconds(sum(one.tokens for one in read)) * self.rng.lognormvariate(0, self.noise) + stall
        # messages arrive in any order
        came = [*self.running, *read]
        self.rng.shuffle(came)
        for one in came:
            self.now += 1e-6
            self.measured.record_tokens(one, 1, self.now)
        self.running += read


def work(engine: Engine, steps: int, stalls: int = 0) -> None:
    """Answers of 40 tokens to prompts that come before some of the steps."""
    for at in range(steps):
        if engine.rng.random() < 0.2 * (1 + (at // 100) % 3):
            engine.send(engine.rng.randrange(200, 2000))
            engine.now += 0.3 * STEP
        engine.step(stall=2.0 if stalls and at % (steps // stalls) == 7 else 0.0)
        for one in [one for one in engine.running if one.output >= 40]:
            engine.end(one)


def quiet(engine: Engine) -> None:
    """Steps without a prompt, until none is in the mean of steps."""
    for _ in range(80):
        engine.step()


@pytest.mark.parametrize(("noise", "stalls"), [(0.0, 0), (0.1, 0), (0.1, 4)])
def test_steps_and_prompts_take_what_they_take_there_whatever_single_ones_did(noise: float, stalls: int) -> None:
    engine = Engine(noise)
    work(engine, 1500, stalls)
    assert engine.view.prefill_rate == pytest.approx(1100 / engine.seconds(1100), rel=0.15)
    quiet(engine)
    assert engine.view.step_seconds == pytest.approx(engine.seconds(), rel=0.1)


def test_steps_follow_a_batch_that_grows_and_shrinks() -> None:
    engine = Engine()
    work(engine, 1000)
    for _ in range(20):
        engine.send(500)
    quiet(engine)
    assert engine.view.step_seconds == pytest.approx(engine.seconds(), rel=0.1)
    for one in engine.running[4:]:
        engine.end(one)
    quiet(engine)
    assert engine.view.step_seconds == pytest.approx(engine.seconds(), rel=0.1)


def test_a_request_waits_until_its_first_token_and_runs_until_it_ends() -> None:
    engine = Engine()
    one, two, seen = engine.send(300, cached=100), engine.send(50), engine.view
    assert (seen.source, seen.in_flight, seen.in_flight_tokens, seen.running) == ("measured", 2, 250, 0)
    engine.step()
    assert (seen.in_flight, seen.in_flight_tokens, seen.running) == (0, 0, 2)
    engine.end(one)
    engine.end(two)
    assert (seen.in_flight, seen.running) == (0, 0)


def test_what_the_gauges_show_beyond_own_requests_is_of_others() -> None:
    engine = Engine()
    engine.send(300)
    engine.step()
    engine.send(200)
    seen = engine.view
    for _ in range(5):
        engine.measured.update_gauges(EngineGauges(active=9, waiting=4, blocks=500, free_blocks=420), engine.now)
    # 2 of the 9 are own ones, and 1 of the 4 that wait; prompts of others are taken to be as long as own ones
    assert (seen.running, seen.waiting, seen.waiting_tokens, seen.in_flight) == (1 + 4, 3, 3 * 300, 1)
    assert (seen.blocks, seen.free_blocks, seen.tokens_per_block) == (500, 420, 4)
    engine.step()
    # the prompt of 200 tokens and two tokens of answers, in blocks of 4
    assert seen.free_blocks == pytest.approx(420 - 202 / 4, abs=1)
    engine.measured.gauges_unavailable(engine.now)
    assert (seen.running, seen.waiting) == (2 + 4, 3)
    engine.measured.gauges_unavailable(engine.now + 3)
    assert (seen.running, seen.waiting) == (2, 0)


def test_a_mean_of_steps_that_are_over_keeps_no_gateway_away():
    """A gateway with an objective for TPOT got no place beside others' requests, however fast they were by then."""
    engine = Engine()
    engine.send(100)
    for _ in range(5):
        engine.step(stall=1.0)
    for _ in range(20):
        engine.measured.update_gauges(EngineGauges(3, 0), engine.now)
    assert (engine.view.step_seconds > 1, engine.view.running) == (True, 3)
    engine.end(engine.running[0])
    engine.measured.update_gauges(EngineGauges(3, 0), engine.now)
    assert (engine.view.step_seconds, engine.view.running > 0) == (0.0, True)


def test_steps_that_read_prompts_of_other_gateways_count_whole():
    """A gateway that took them for outliers sent requests beyond the objective for TPOT."""
    engine, steps = Engine(), 400
    for _ in range(4):
        engine.send(2000)
        engine.step()
    quiet(engine)
    for _ in range(5):
        engine.measured.update_gauges(EngineGauges(8, 0), engine.now)
    began, seen = engine.now, []
    for at in range(steps):
        engine.step(stall=0.15 if at % 8 == 0 else 0.0)
        seen.append(engine.view.step_seconds)
    assert sum(seen) / steps == pytest.approx((engine.now - began) / steps, rel=0.1)
