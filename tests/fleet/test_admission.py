"""The gate on an event loop, and what settings and headers make of it."""

import asyncio
import math

import pytest

from llmops.gateway.errors import ClientDeadlineError, InvalidRequestError, UnavailableError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller, ReplicaView, RoutingRequest, SchedulingParams
from llmops.gateway.routing.admission import request_queue
from llmops.gateway.routing.admission.admission_controller import AdmissionController, AdmissionLimits
from llmops.gateway.routing.admission.request_queue import RequestQueue, create_admission_controller
from llmops.gateway.routing.admission.slo_headers import SloHeaders
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from llmops.gateway.settings import GatewaySettings
from tests.fleet.views import ticket, view
from tests.support.waiting import Clock


def admission(views: list[ReplicaView], clock: Clock | None = None, **bounds: int) -> RequestQueue:
    tiers = [PriorityTier("interactive", max_wait=1.0), PriorityTier("batch", max_wait=600.0)]
    limits = AdmissionLimits(**{"steps": 2, **bounds})
    door = AdmissionController(TieredQueue(tiers), LeastCostPolicy(PrefixIndex()), limits)
    return RequestQueue(door, lambda: views, clock or Clock(100.0))


def waiting(door: RequestQueue, tenant: str, tier: str = "batch") -> asyncio.Task[ReplicaView]:
    return asyncio.create_task(door.enter(ticket(tenant, arrived=100.0, tier=tier)))


async def all_wait() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_who_finds_room_does_not_wait_and_others_go_when_there_is_some() -> None:
    views = [view("a")]
    door = admission(views)
    assert (await door.enter(ticket("x", tokens=400))).replica_id == "a"
    tasks = [waiting(door, tenant) for tenant in "yz"]
    await all_wait()
    assert len(door) == 2
    views[0].in_flight_tokens = 399
    door.update()
    assert (await tasks[0]).replica_id == "a"
    await all_wait()
    assert not tasks[1].done()
    views[0].in_flight_tokens = 0
    door.update()
    assert ((await tasks[1]).replica_id, len(door)) == ("a", 0)


async def test_a_refusal_says_when_to_come_back() -> None:
    views = [view("a", waiting_tokens=40_000)]
    with pytest.raises(UnavailableError, match="the predicted wait exceeds its limit") as refused:
        await admission(views).enter(ticket("x", arrived=100.0, tier="interactive"))
    error = refused.value
    assert (error.status, error.code, error.should_retry) == (503, "overloaded", True)
    assert not isinstance(error, ClientDeadlineError)
    assert error.retry_after is not None
    # 40,100 tokens at 10,000/s and half a step: the queue has room a second before, give or take a fifth
    assert 3.01 * 0.8 <= error.retry_after <= 3.05 * 1.2
    assert error.headers()["retry-after-ms"] == str(math.ceil(1000 * error.retry_after))


async def test_the_queue_alone_is_enough_to_refuse_before_anything_is_known_of_a_prompt() -> None:
    door = admission([view("a", waiting_tokens=500)])
    door.check(ticket("x", tokens=0, arrived=100.0, tier="interactive"))
    tasks = [waiting(door, "x", tier) for tier in ("interactive", *["batch"] * 200)]
    await all_wait()
    door.check(ticket("x", tokens=0, arrived=100.0, tier="interactive"))
    with pytest.raises(UnavailableError):
        door.check(ticket("x", tokens=0, arrived=100.0, tier="batch", deadline=100.5))
    door.close()
    assert all(isinstance(error, UnavailableError) for error in await asyncio.gather(*tasks, return_exceptions=True))


async def test_who_leaves_is_not_waited_for() -> None:
    views = [view("a", waiting_tokens=500)]
    door = admission(views)
    tasks = [waiting(door, tenant) for tenant in "xy"]
    await all_wait()
    tasks[0].cancel()
    await all_wait()
    views[0].waiting_tokens = 0
    door.update()
    assert ((await tasks[1]).replica_id, len(door), views[0].in_flight) == ("a", 0, 1)


async def test_who_leaves_just_when_it_is_its_turn_takes_no_room() -> None:
    views = [view("a", waiting_tokens=500)]
    door = admission(views)
    task = waiting(door, "x")
    await all_wait()
    views[0].waiting_tokens = 0
    door.update()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (views[0].in_flight, views[0].in_flight_tokens) == (0, 0)


async def test_who_was_let_in_and_waits_too_long_after_all_is_refused() -> None:
    door = admission([view("a", waiting_tokens=500)])
    with pytest.raises(ClientDeadlineError) as refused:
        await door.enter(ticket("x", arrived=100.0, tier="batch", deadline=100.1, client_deadline=100.1))
    assert (refused.value.code, len(door), len(door.controller.queue)) == ("overloaded", 0, 0)


async def test_without_a_replica_that_takes_it_nobody_waits() -> None:
    with pytest.raises(UnavailableError, match="No replica") as refused:
        await admission([view("a", state="gone")]).enter(ticket("x"))
    assert refused.value.code == "engine_unavailable"


def test_without_objectives_and_tiers_there_is_no_gate() -> None:
    assert create_admission_controller(GatewaySettings(), "m", LeastCostPolicy()) is None


def test_tiers_and_their_waits_come_from_the_settings() -> None:
    settings = GatewaySettings(
        slo={"ttft_p95": "500ms", "tpot_p95": "50ms"},
        tiers={"interactive": {"weight": 4}, "standard": {}, "batch": {"share": 0.1, "max_wait": "10m"}},
        waiting={"entries": 7},
    )
    door = create_admission_controller(settings, "m", LeastCostPolicy())
    assert door is not None
    assert (door.limits.entries, door.limits.tpot) == (7, pytest.approx(0.05))

    def tier(name: str) -> PriorityTier:
        return door.queue.tier(ticket(tier=name))

    assert tier("interactive") == PriorityTier("interactive", 4.0, 0.0, 0.3)
    assert tier("batch") == PriorityTier("batch", 1.0, 0.1, 600.0)
    # who has no tier, or one that is not there
    assert tier("") == tier("unknown") == PriorityTier("standard", max_wait=60.0)


async def hinted(caller: Caller, **headers: str) -> SchedulingParams:
    context = RequestContext("r", caller=caller, started=5.0)
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await SloHeaders().before({"type": "http", "headers": pairs}, context)
    return context.scheduling


async def test_a_client_may_say_when_its_first_token_is_due_and_some_on_whose_behalf_they_ask() -> None:
    headers = {"x_llm_d_slo_ttft_ms": "250", "x_llm_d_inference_fairness_id": "customer-7"}
    plain = Caller(share="acme/key", tier="gold")
    assert await hinted(plain) == SchedulingParams("acme", "gold", 5.0, math.inf)
    assert await hinted(plain, **headers) == SchedulingParams("acme", "gold", 5.0, 5.25)
    turn = await hinted(Caller(share="acme/key", scopes=frozenset({"inference", "fairness"})), **headers)
    assert turn.tenant == "acme/customer-7"
    assert request_queue.create_queued_request(turn, RoutingRequest(3), held_bytes=9).deadline == 5.25


@pytest.mark.parametrize("value", ["", "soon", "-1", "0", "nan", "inf"])
async def test_a_time_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-llm-d-slo-ttft-ms"):
        await hinted(Caller(), x_llm_d_slo_ttft_ms=value)
