"""Tests of the order in which requests leave the queue."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmops.gateway.interfaces import QueuedRequest, ReplicaCapacity
from llmops.gateway.routing.admission.fair_queue import FairQueue, expected_service_cost
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from tests.fleet.views import ticket

TENANTS = ["a", "b", "c", "d"]
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
LARGEST = 400 + 2 * 100


def drain(order: TieredQueue, count: int, now: float = 0.0) -> list[QueuedRequest]:
    return [one for one in (order.pop(ReplicaCapacity(), now) for _ in range(count)) if one is not None]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(20, 200))
def test_tenants_that_wait_get_tokens_by_their_weights(seed: int, rounds: int) -> None:
    """VTC's bound: what two that wait all the time were served differs by no more than their largest requests do."""
    rng, order = random.Random(seed), TieredQueue([PriorityTier("only")])
    served = dict.fromkeys(TENANTS, 0.0)

    def add(tenant: str) -> None:
        order.push(ticket(tenant, rng.randint(1, 400), rng.randint(1, 100), weight=WEIGHTS[tenant]))

    for tenant in TENANTS:
        add(tenant)
        add(tenant)
    for _ in range(rounds):
        (one,) = drain(order, 1)
        add(one.tenant)
        # the answer is never as long as was thought
        truth = rng.randint(1, 100)
        order.served(one, 0, truth - one.routing.answer)
        served[one.tenant] += (one.routing.tokens + 2 * truth) / one.weight
        for one_tenant in TENANTS:
            for other in TENANTS:
                bound = LARGEST / WEIGHTS[one_tenant] + LARGEST / WEIGHTS[other]
                assert abs(served[one_tenant] - served[other]) <= bound


class Orders(RuleBasedStateMachine):
    """Any sequence of what can happen, beside a plain list of those who wait."""

    def __init__(self) -> None:
        super().__init__()
        self.order = TieredQueue([PriorityTier("high"), PriorityTier("low", share=0.2)], patience=5.0)
        self.waiting: list[QueuedRequest] = []
        self.now = 0.0

    @rule(
        tenant=st.sampled_from(TENANTS),
        tier=st.sampled_from(["high", "low", "unknown"]),
        tokens=st.integers(1, 300),
        held=st.integers(0, 50),
        moved=st.booleans(),
    )
    def push(self, tenant: str, tier: str, tokens: int, held: int, moved: bool) -> None:
        one = ticket(tenant, tokens, 10, self.now, tier=tier, bytes=held, moved=moved, weight=WEIGHTS[tenant])
        self.order.push(one)
        self.waiting.append(one)

    @rule(tokens=st.integers(0, 400))
    def pop(self, tokens: int) -> None:
        self.now += 1
        fitting = [one for one in self.waiting if one.size <= tokens]
        found = self.order.pop(ReplicaCapacity(tokens), self.now)
        # never over room, and never nothing while a request fits
        assert (found is None) == (not fitting)
        if found is not None:
            assert found in fitting
            same = [one for one in fitting if one.tenant == found.tenant and self.lane(one) == self.lane(found)]
            assert found is next((one for one in reversed(same) if one.moved), same[0])
            self.waiting.remove(found)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        assert self.order.remove(one)
        assert not self.order.remove(one)
        self.waiting.remove(one)

    @rule(tenant=st.sampled_from(TENANTS), answer=st.integers(-20, 50))
    def served(self, tenant: str, answer: int) -> None:
        self.order.served(ticket(tenant, weight=WEIGHTS[tenant], tier="high"), 0, answer)

    def lane(self, one: QueuedRequest) -> str:
        return "high" if one.tier == "high" else "low"

    @invariant()
    def adds_up(self) -> None:
        assert len(self.order) == len(self.waiting) == len(list(self.order))
        assert self.order.bytes == sum(one.bytes for one in self.waiting)
        tenants = {(self.lane(one), one.tenant) for one in self.waiting}
        assert abs(self.order.demand() - sum(WEIGHTS[tenant] for _, tenant in tenants)) < 1e-6
        assert self.order.held is None or self.order.held in self.waiting


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_tiers_are_strict() -> None:
    order = TieredQueue([PriorityTier("interactive"), PriorityTier("standard"), PriorityTier("batch")])
    for tier in ("batch", "standard", "interactive"):
        for number in range(3):
            order.push(ticket(str(number), tier=tier))
    assert [one.tier for one in drain(order, 9)] == ["interactive"] * 3 + ["standard"] * 3 + ["batch"] * 3


def test_a_tier_gets_the_share_that_it_has_for_certain() -> None:
    order = TieredQueue([PriorityTier("interactive"), PriorityTier("batch", share=0.2)])
    for _ in range(200):
        order.push(ticket("a", tier="interactive"))
        order.push(ticket("b", tier="batch"))
    assert [one.tier for one in drain(order, 101)][1:].count("batch") == 20


def test_a_tenant_that_was_away_does_not_save_up() -> None:
    order = TieredQueue([PriorityTier("only")])
    for _ in range(50):
        order.push(ticket("busy"))
        drain(order, 1)
    for _ in range(20):
        order.push(ticket("busy"))
        order.push(ticket("new"))
    assert [one.tenant for one in drain(order, 20)].count("new") == 10


def test_nobody_starves_behind_tenants_that_come_new_all_the_time() -> None:
    order = TieredQueue([PriorityTier("only")])
    order.push(patient := ticket("patient", tokens=1000))
    for number in range(200):
        order.push(ticket(f"new-{number}", tokens=10))
        order.push(ticket(f"newer-{number}", tokens=10))
        (one,) = drain(order, 1)
        if one is patient:
            break
    assert one is patient


def test_those_at_home_come_first_and_others_once_they_need_not_wait_for_their_own() -> None:
    order = TieredQueue([PriorityTier("only")])
    elsewhere, here = ticket("a", home="x", home_until=1.0), ticket("a", home="y")
    order.push(elsewhere)
    order.push(here)
    popped = [order.pop(ReplicaCapacity(replica_id="y"), now) for now in (0.5, 0.5, 1.0)]
    assert popped == [here, None, elsewhere]


def test_what_is_ahead_are_higher_tiers_and_a_fair_part_of_ones_own() -> None:
    order = TieredQueue([PriorityTier("high"), PriorityTier("low")])
    order.push(ticket("x", tokens=80, answer=10, tier="high"))
    for tenant in "aabbbbbc":
        order.push(ticket(tenant, tokens=80, answer=10, tier="low"))
    # the higher tier, its own two, and as much of each other tenant
    ahead = {tenant: order.ahead(ticket(tenant, tier="low")) for tenant in ("a", "new", "b")}
    assert ahead == {"a": 100 + 200 + 400, "new": 100, "b": 100 + 500 + 300}


def test_counters_of_tenants_that_left_are_not_kept_for_ever() -> None:
    fair = FairQueue()
    for number in range(12_000):
        one = ticket(f"tenant-{number}")
        fair.push(one)
        fair.begin(one)
        fair.remove(one)
        fair.charge(one, -expected_service_cost(one) / 2)
    assert len(fair._counters) <= 10_001
