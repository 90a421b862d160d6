"""The fleet behind a gate: who waits, who is told of it, and who makes room."""

import asyncio
import struct
from types import SimpleNamespace

import pytest

from llmops.gateway.errors import CancelledStreamError, PreemptedError, UnavailableError
from llmops.gateway.interfaces import EngineRequest, SchedulingParams, TokenBatch, TokenStream
from llmops.gateway.routing.admission.admission_controller import AdmissionController, AdmissionLimits
from llmops.gateway.routing.admission.tiered_queue import PriorityTier, TieredQueue
from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.placement.prefix_index import PrefixIndex
from llmops.gateway.routing.replicas.replica import Replica
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.gateway.triton.engine_observer import EngineIdentity, EngineState
from llmops.kv_blocks import block_hashes


class Tokens(TokenStream):
    """One token, and then nothing until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.given = False

    async def __anext__(self) -> TokenBatch:
        if not self.given:
            self.given = True
            return TokenBatch(0, [1])
        await self.cancelled.wait()
        raise CancelledStreamError

    def cancel(self) -> None:
        self.cancelled.set()


class Endless:
    """Takes everything."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.fails = False

    async def open(self, request: EngineRequest) -> TokenStream:
        if self.fails:
            raise UnavailableError("Triton cannot be reached.")
        self.requests.append(request)
        return Tokens()


def made(count: int = 1, gate: bool = True, **options) -> tuple[ReplicaPool, list[Endless], list[Replica]]:
    policy = LeastCostPolicy()
    tiers = TieredQueue([PriorityTier(name, max_wait=60.0) for name in ("interactive", "batch")], default="batch")
    controller = AdmissionController(tiers, policy, AdmissionLimits()) if gate else None
    fleet = ReplicaPool("tiny", policy, controller=controller, **options)
    engines = [Endless() for _ in range(count)]
    replicas = []
    for at, engine in enumerate(engines):
        card = SimpleNamespace(max_batch_size=2, adapters=(), state=False, engine="e" * 64)
        one = Replica(f"r{at}", SimpleNamespace(name="tiny", card=card, engine=engine), policy, fleet.update)
        one.health.set_loaded(True)
        one.update_state()
        replicas.append(one)
    fleet.replicas = {one.replica_id: one for one in replicas}
    return fleet, engines, replicas


def request(tier: str = "batch", **fields) -> EngineRequest:
    turn = SchedulingParams("tenant", tier, asyncio.get_running_loop().time())
    return EngineRequest("x", list(range(8)), 16, turn=turn, **fields)


async def test_a_request_that_does_not_get_through_is_asked_of_the_others_once_each():
    fleet, engines, _ = made(3, gate=False)
    engines[0].fails = engines[1].fails = True
    for _ in range(6):
        (await fleet.open(request())).cancel()
    assert len(engines[2].requests) == 6
    engines[2].fails = True
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await fleet.open(request())
    assert [one.open_streams for one in fleet.replicas.values()] == [0, 0, 0]


async def test_where_the_cache_is_full_the_lower_tier_makes_room():
    fleet, _, (replica,) = made()
    urgent, batch = await fleet.open(request("interactive")), await fleet.open(request("batch"))
    for stream in (urgent, batch):
        await stream.__anext__()
    replica.view.blocks, replica.view.free_blocks = 100, 2
    fleet.update()
    with pytest.raises(PreemptedError):
        await batch.__anext__()
    assert replica.open_streams == 1
    waits = asyncio.create_task(urgent.__anext__())
    await asyncio.sleep(0)
    assert not waits.done()
    urgent.cancel()
    with pytest.raises(CancelledStreamError):
        await waits


def state(**numbers: int) -> EngineState:
    return EngineState(**{**dict.fromkeys(EngineState._fields, 0), "blocks": 100, "free_blocks": 50, **numbers})


async def test_a_replica_that_lies_is_believed_no_less_than_what_it_was_given():
    _, _, (replica,) = made(gate=False)
    replica.open_streams = 20
    replica.on_state(state())
    assert replica.view.running == 20
    replica.on_state(state(running=-5, free_blocks=10**9))
    assert (replica.view.free_blocks, replica.view.blocks) == (50, 100), "no engine can be so"


async def test_a_few_tokens_beside_a_batch_do_not_say_how_fast_prompts_are_read():
    _, _, (replica,) = made(gate=False)
    replica.on_state(state(running=8, prefill_tokens=4000, step_us=200_000))
    assert replica.view.prefill_rate == 20_000
    for _ in range(30):
        replica.on_state(state(running=8, prefill_tokens=3, step_us=20_000))
    assert replica.view.prefill_rate == pytest.approx(20_000, rel=0.01)


async def test_an_answer_of_another_engine_is_counted_and_the_replica_left():
    wrong = []
    _, _, (replica,) = made(gate=False)
    replica._on_misrouted = lambda: wrong.append(1)
    replica.on_identity(EngineIdentity("tiny", "1", "e" * 64, "i"))
    assert (wrong, replica.view.state) == ([], "ready")
    replica.on_identity(EngineIdentity("tiny", "1", "f" * 64, "i"))
    assert (wrong, replica.view.state) == ([1], "gone")
    assert replica.problem == f"it answers with engine {'f' * 12}, and its metadata announces {'e' * 12}"


async def test_on_a_replica_that_reports_nothing_a_request_waits_until_its_first_token_and_leaves_its_blocks():
    fleet, _, (replica,) = made(gate=False)
    view, index = replica.view, PrefixIndex()
    fleet.policy.index = index
    view.tokens_per_block = 4
    stream = await fleet.open(request())
    assert (view.running, view.in_flight, view.in_flight_tokens) == (0, 1, 8)
    await stream.__anext__()
    assert (view.running, view.in_flight, view.in_flight_tokens) == (1, 0, 0)
    stream.attach(lambda batch: True)
    for _ in range(4):
        # as the engine's stream hands tokens to who waits for them
        stream._take(TokenBatch(0, [1]))
    stream.cancel()
    assert (view.running, view.in_flight) == (0, 0)
    # 8 tokens of the prompt and 5 of the answer, of which the last was never computed
    names = block_hashes(struct.pack("<12i", *request().input_ids, 1, 1, 1, 1), 4)
    assert index.held(names) == [(3, index.bit("r0"))]


async def test_who_is_let_in_when_its_replica_has_just_gone_leaves_nothing_behind():
    fleet, _, (replica,) = made()
    asked = asyncio.create_task(fleet.open(request()))
    gate = fleet.queue.controller
    replica.view.running = 2
    await asyncio.sleep(0)
    replica.view.running = 0
    fleet.update()
    fleet.replicas = {}
    with pytest.raises(UnavailableError, match="has no replicas now"):
        await asked
    assert (replica.view.in_flight, replica.view.in_flight_tokens, gate._tenants._totals.total()) == (0, 0, 0)


async def test_a_tenant_whose_prompts_begin_with_the_time_is_told_where_they_part(caplog):
    from llmops.gateway.routing.replicas.pool_registry import unstable_prompt_log

    fleet, _, _ = made(gate=False, on_prompt=unstable_prompt_log("tiny"))
    for second in range(60):
        ids = [*range(20), 1000 + second, *range(100, 300)]
        (await fleet.open(EngineRequest("x", ids, 1, caller="acme/key1"))).cancel()
        (await fleet.open(EngineRequest("y", [*range(300)], 1, caller="other/key2"))).cancel()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "of the prompts of tenant 'acme' for the model 'tiny' differ at token 20" in said
