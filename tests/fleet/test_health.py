"""States of a replica, by what was heard of it: pure, so time is what the test says it is."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import EngineRequest
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.replicas.health_check import FAILURE_COOLDOWN, SUSPECT_TIMEOUT, HealthCheck
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.triton.engine_observer import EngineState
from llmops.gateway.triton.step_stream import StepStreamTransport
from tests.fleet.test_unseen import Engine
from tests.fleet.views import settled
from tests.steps.test_submissions import CARD


def speaking(now: float = 0.0) -> HealthCheck:
    health = HealthCheck(is_reporting=True, now=now)
    health.set_loaded(True)
    return health


def looked(health: HealthCheck, start: float, end: float) -> str:
    """Looked at four times a second, as the gateway does."""
    state, now = "", start
    while now <= end:
        state = health.update(now)
        now += 0.25
    return state


def test_it_starts_is_ready_and_suspected_after_five_silent_seconds() -> None:
    health = speaking()
    assert looked(health, 0, 60) == "starting"
    assert health.silent_seconds(60.0) is None
    health.record_report(60.0, draining=False)
    assert [health.silent_seconds(now) for now in (60.0, 60.25, 59.0)] == [0.0, 0.25, 0.0]
    assert looked(health, 60.25, 60 + SUSPECT_TIMEOUT) == "ready"
    assert health.update(60.25 + SUSPECT_TIMEOUT) == "suspect"
    health.record_report(70.0, draining=False)
    assert health.update(66.0) == "ready"


def test_a_connection_that_ends_is_suspect_at_once_and_gone_when_triton_is() -> None:
    health = speaking()
    health.record_report(0.0, draining=False)
    health.record_disconnect()
    assert health.update(0.1) == "suspect"
    health.set_loaded(False)
    assert health.update(0.2) == "gone"
    health.record_report(0.3, draining=False)
    assert health.update(0.3) == "ready", "its own word is newer than Triton's"


def test_one_that_was_never_heard_is_not_suspected_of_anything() -> None:
    health = speaking()
    health.record_disconnect()
    assert health.update(0.0) == "starting"


def test_draining_is_what_it_says_itself() -> None:
    health = speaking()
    health.record_report(0.0, draining=True)
    assert health.update(0.1) == "draining"


def test_a_gateway_that_was_held_up_suspects_nobody_for_it() -> None:
    health = speaking()
    health.record_report(0.0, draining=False)
    assert [health.update(now) for now in (0.25, 60.0)] == ["ready", "ready"]
    assert looked(health, 60.25, 60.0 + SUSPECT_TIMEOUT + 0.5) == "suspect"


@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_clock_that_jumps_never_makes_a_replica_worse_while_it_is_heard(jumps: list[float]) -> None:
    health, now = speaking(), 0.0
    for jump in jumps:
        now += jump
        health.record_report(now, draining=False)
        assert health.update(now) == "ready"
        assert (health.silent_seconds(now - 5) or 0.0) >= 0.0


def test_one_that_says_nothing_is_passed_over_after_a_failure() -> None:
    health = HealthCheck(is_reporting=False, now=0.0)
    assert health.update(0.0) == "starting"
    health.set_loaded(True)
    assert health.update(0.25) == "ready"
    health.record_failure(0.5)
    assert looked(health, 0.5, 0.5 + FAILURE_COOLDOWN - 0.25) == "suspect"
    assert health.update(0.5 + FAILURE_COOLDOWN) == "ready"
    health.set_loaded(False)
    assert health.update(1.0 + FAILURE_COOLDOWN) == "gone"


async def test_answers_stay_with_a_silent_replica_until_another_is_ready() -> None:
    """It may only be slow, and there is no place for them."""
    engine, now, others = Engine(), [0.0], list[str]()
    card = replace(CARD, state=True)
    transport = StepStreamTransport(lambda: engine, "tiny-tensorrt_llm", card)
    model = SimpleNamespace(name="tiny", card=card, engine=transport)
    options = {"has_alternative": lambda: bool(others), "clock": lambda: now[0]}
    replica = Replica("r", model, LeastCostPolicy(), lambda: None, **options)
    replica.health.set_loaded(True)
    replica.start(0.3)
    await settled()
    engine.say()
    engine.deliver()
    await settled()
    stream = await replica.open(EngineRequest("x", [1], 8), replica.reserve(1, is_counted=False))
    token = asyncio.ensure_future(anext(stream))
    while replica.view.state != "suspect":
        now[0] += 0.25
        replica.update_state()
    await settled()
    assert now[0] > SUSPECT_TIMEOUT
    assert not token.done()
    others.append("another")
    replica.update_state()
    with pytest.raises(UnavailableError, match="Replica r stopped responding"):
        await asyncio.wait_for(token, 60)
    replica.stop()
    await transport.close()


def reporting_replica() -> Replica:
    engine = StepStreamTransport(Engine, "tiny", CARD)
    model = SimpleNamespace(name="tiny", card=replace(CARD, state=True), engine=engine)
    return Replica("r", model, LeastCostPolicy(), lambda: None, clock=lambda: 0.0)


def test_a_replica_that_is_away_is_no_flood_of_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried some times a second."""
    replica = reporting_replica()
    ready = EngineState(0, 0, 0, 8, 8, 32, 0, 0, 1, 0, 0, 0)
    replica.health.set_loaded(True)
    with caplog.at_level("INFO"):
        for _ in range(2):
            replica.on_state(ready)
            replica.on_disconnect(UnavailableError("It went away."))
            for _ in range(3):
                replica.on_disconnect(UnavailableError("It refuses connections."))
    ends = [line.rpartition("again: ")[2] for line in caplog.messages if "ended" in line]
    assert ends == 2 * ["It went away.", "It refuses connections."]


def test_a_place_is_free_when_its_answer_ends_after_the_report_of_the_step() -> None:
    """An engine without work reports the next time after a second."""
    replica = reporting_replica()
    first, second = [replica.reserve(8, is_counted=False) for _ in range(2)]
    first.slot, second.slot = 0, 1
    # the step in which both end: the engine has taken slots 0 and 1, and runs nothing
    replica.on_state(EngineState(0, 0, 0, 8, 8, 32, 0, 0, 1, 0, 0, 2))
    assert replica.view.running == 2
    for one, left in ((first, 1), (second, 0)):
        replica.release(one)
        assert replica.view.running == left
