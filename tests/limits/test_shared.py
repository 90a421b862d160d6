"""Gateways on one Valkey, a Valkey that goes away or comes back empty, and the limits of one process."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from llmops.gateway.conversations.checkpoints import CheckpointStore
from llmops.gateway.errors import RateLimitError
from llmops.gateway.interfaces import Budget, Outcome, Quota, Usage
from llmops.gateway.ratelimit.buckets import Limit, LimitRequest, Settlement
from llmops.gateway.ratelimit.limits import RateLimits
from llmops.gateway.ratelimit.memory import MAX_RECORDS, InMemoryLimiter
from llmops.gateway.ratelimit.quotas import CallerLimits
from llmops.gateway.ratelimit.rate_limit_check import create_limit_check
from llmops.gateway.ratelimit.redis import RedisLimiter
from llmops.gateway.redis_client import connect, reconnect
from llmops.gateway.settings import GatewaySettings, Quotas
from tests.limits.conftest import PATIENCE, shared, until_up
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import GENEROUS, Clock, eventually

ATTEMPTS = 4_000


async def test_three_gateways_on_one_valkey_get_the_limit_and_what_refills(redis_url, prefix):
    limit = 1200
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(shared(redis_url, prefix)) for _ in range(3)]
        began = time.monotonic()
        want = [Limit("key", limit)], [LimitRequest(1)]
        asked = await asyncio.gather(*(gateways[at % 3].reserve(*want) for at in range(ATTEMPTS)))
        seconds = time.monotonic() - began
    assert all(reserved.by in gateways for reserved in asked)
    got = sum(reserved.decision.lacking is None for reserved in asked)
    assert 0.99 * limit <= got <= limit + seconds * limit / 60 + 1
    waits = [reserved.decision.wait for reserved in asked if reserved.decision.lacking is not None]
    assert 0 < max(waits) <= 60 / limit


async def test_settlements_travel_and_are_not_lost(redis_url, prefix):
    bounds = [Limit("key", 6, places=1)]
    async with shared(redis_url, prefix) as one, shared(redis_url, prefix) as other:
        await one.reserve(bounds, [LimitRequest(6, places=1)])
        refused = await other.reserve(bounds, [LimitRequest(places=1)])
        assert (refused.decision.lacking, refused.decision.of) == (0, "places")
        one.settle(bounds, Settlement(requests=-5, places=-1))

        async def freed():
            return (await other.reserve(bounds, [LimitRequest(places=1)])).decision.lacking is None

        await eventually(freed)
        assert (await other.reserve(bounds, [LimitRequest(5)])).decision.lacking is None


async def test_a_limit_that_was_lowered_holds_at_once_in_valkey_too(redis_url, prefix):
    async with shared(redis_url, prefix) as limiter:
        await limiter.reserve([Limit("key", 1000, 1000)], [LimitRequest(100, 100)])
        lowered = [Limit("key", 10, 20)]
        requests, tokens, _, _ = (await limiter.reserve(lowered, [LimitRequest()])).decision.left[0]
        assert (requests, tokens) == (10, 20)
        limiter.settle(lowered, Settlement(-50, -50))
        assert (await limiter.reserve(lowered, [LimitRequest()])).decision.left[0][:2] == (10, 20)


async def test_who_leaves_while_it_is_asked_has_nothing(redis_url, prefix):
    bounds, asks = [Limit("key", 5, places=1)], [LimitRequest(5, places=1)]
    async with shared(redis_url, prefix) as limiter:
        asking = asyncio.create_task(limiter.reserve(bounds, asks))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await limiter.reserve(bounds, [LimitRequest()])
        assert (await limiter.reserve(bounds, asks)).decision.lacking is None


@pytest.mark.parametrize("how", ["kill -9", "SIGSTOP"])
async def test_a_valkey_that_goes_away(valkey, prefix, how):
    """Everybody is answered all the time, with this gateway's third of the limit; it is shared again afterwards."""
    want = [Limit("key", 300, places=9)], [LimitRequest(1)]
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(shared(valkey.url, prefix, Clock(), PATIENCE)) for _ in range(3)]
        for gateway in gateways:
            assert (await gateway.reserve(want[0], [LimitRequest(1, places=1)])).by is gateway
        first = gateways[0]
        await first.reserve(*want)
        assert first.gateways == 3
        valkey.kill() if how == "kill -9" else valkey.tell(signal.SIGSTOP)
        asked = [await first.reserve(*want) for _ in range(120)]
        assert all(reserved.by is not first for reserved in asked)
        assert {reserved.bounds[0].requests for reserved in asked} == {100}
        assert sum(reserved.decision.lacking is None for reserved in asked) == pytest.approx(300 / 3, abs=1)
        valkey.start() if how == "kill -9" else valkey.tell(signal.SIGCONT)
        await until_up(first)
        assert (await first.reserve(*want)).by is first

        # what they held they still hold, and nothing twice: as soon as each has given a sign of life
        async def all_held():
            for gateway in gateways:
                gateway.beat()
            reserved = await first.reserve(want[0], [LimitRequest()])
            return reserved.by is first and reserved.decision.left[0][2] == 9 - 3

        await eventually(all_held)


async def test_a_failover_to_a_replica_is_followed(valkey, redis_url, prefix):
    """Before the fix, connections stayed at the old primary, which refuses writes, and limits were not shared again."""
    bounds, new = [Limit("key", 60)], urlsplit(redis_url)
    async with TcpProxy(f"127.0.0.1:{valkey.port}") as proxy:
        checkpoints = CheckpointStore(f"redis://{proxy.address}", 5.0)
        await checkpoints.start(lambda _: None)
        async with shared(f"redis://{proxy.address}", prefix) as limiter:
            with Redis.from_url(valkey.url) as old:
                old.execute_command("REPLICAOF", new.hostname, new.port)
            proxy.target = f"{new.hostname}:{new.port}"
            assert (await limiter.reserve(bounds, [LimitRequest(1)])).by is not limiter
            await eventually(lambda: not checkpoints.up)
            await until_up(limiter)
            await eventually(lambda: checkpoints.up)
            assert (await limiter.reserve(bounds, [LimitRequest(1)])).by is limiter
        await checkpoints.close()


async def test_calls_go_on_while_a_failover_is_followed(redis_url, prefix):
    """Before the fix, their connections were closed too, and a call that was connecting ended its task."""
    client = connect(redis_url, GENEROUS, GENEROUS)
    call = asyncio.create_task(client.blpop([prefix], GENEROUS))
    with Redis.from_url(redis_url) as other:
        await eventually(lambda: any(one["cmd"] == "blpop" for one in other.client_list()))
        await reconnect(client)
        other.rpush(prefix, "value")
    assert (await call)[1] == b"value"
    await client.aclose()


async def test_a_rate_below_one_per_gateway_is_neither_exceeded_nor_zero(valkey, prefix):
    """Four gateways and one request a minute: without Valkey each gives a quarter of a request per minute."""
    clock = Clock()
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(shared(valkey.url, prefix, clock)) for _ in range(4)]
        first, want = gateways[0], ([Limit("key", 1)], [LimitRequest(1)])
        await first.reserve(want[0], [LimitRequest()])
        valkey.kill()
        given = 0
        for _ in range(40):
            given += (await first.reserve(*want)).decision.lacking is None
            clock.now += 30
        # twenty minutes, and what a full bucket gives at first
        assert given in (5, 6)


def flush(valkey):
    with Redis.from_url(valkey.url) as client:
        client.flushall()


def restart(valkey):
    valkey.kill()
    valkey.start()


class LateLedger:
    """Knows of nothing that was spent, as a ledger does in the first moments. Counts how often it is asked."""

    asked = 0

    def tariff(self, model, at):
        return lambda prompt, cached, answer: prompt + answer

    async def spent(self, of, since):
        self.asked += 1
        return 0


@pytest.mark.parametrize("how", ["flush", "restart", "stop"])
async def test_a_valkey_that_loses_its_data_gives_no_money_away(valkey, prefix, how):
    """Two gateways spend a budget of $0.50 by requests of one cent, while Valkey is broken three times."""
    budget = Quota("key", budget=Budget(500_000, "month"))
    async with AsyncExitStack() as stack:
        limiters = [await stack.enter_async_context(shared(valkey.url, prefix, timeout=PATIENCE)) for _ in range(2)]
        ledger = LateLedger()
        gates = [RateLimits(limiter, ledger) for limiter in limiters]
        plans = [CallerLimits((budget,)) for _ in gates]

        async def ask(at: int) -> int:
            ticket = gates[at].new_reservation(plans[at])
            try:
                await ticket.enter()
                answer = await ticket.tokens("tiny", 9_000, 1_000)
            except RateLimitError:
                ticket.close(Outcome(429, "error"))
                return 0
            ticket.close(Outcome(200, "stop", Usage(9_000, completion_tokens=answer)))
            return 9_000 + answer

        spent, asked_again = 0, False
        for _ in range(3):
            for at in range(12):
                spent += await ask(at % 2)
            asked = ledger.asked
            if how == "stop":
                valkey.tell(signal.SIGSTOP)
                for at in range(60):
                    spent += await ask(at % 2)
                valkey.tell(signal.SIGCONT)
            else:
                await asyncio.to_thread(flush if how == "flush" else restart, valkey)
                # whichever comes first tells Valkey what it knows, and asks the ledger again
                for at in range(4):
                    spent += await ask(at % 2)
            for limiter in limiters:
                await until_up(limiter)
            asked_again = asked_again or ledger.asked > asked
        assert asked_again
        for at in range(200):
            spent += await ask(at % 2)
            if at % 20 == 0:
                for limiter in limiters:
                    await until_up(limiter)
        # each time, a request of each gateway may be one that the other does not know of yet
        assert 480_000 <= spent <= 500_000 + 3 * 2 * 10_000


@pytest.mark.parametrize("how", ["after the start", "before the start"])
async def test_a_valkey_that_goes_away_at_a_start_gives_no_money_away(valkey, prefix, how):
    """Before the fix, gateways that did not know of each other yet spent $0.75 to $1.50 of $0.50."""
    want = [Limit("key", money=500_000, period=1)], [LimitRequest(money=10_000, least=10_000)]
    async with AsyncExitStack() as stack:
        gateways = [RedisLimiter(valkey.url, prefix, PATIENCE, Clock(), least_parts=3) for _ in range(3)]
        for gateway in gateways:
            stack.push_async_callback(gateway.close)
            if how == "after the start":
                await gateway.start()
        valkey.kill()
        asked = []
        for at in range(200):
            gateways[at % 3].spent(*want[0], 0)  # the ledger was read, and is late
            asked.append(await gateways[at % 3].reserve(*want))
    assert 480_000 <= sum(one.decision.money for one in asked) <= 500_000


async def test_open_requests_count_in_a_gateways_part_while_valkey_is_away(valkey, prefix):
    """Before the fix, two gateways spent $0.90 of $0.50, and four requests were open where two may be."""
    key, slots = Limit("key", money=500_000, period=1), Limit("slots", places=2)
    ask = LimitRequest(money=10_000, least=10_000, places=1)
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(shared(valkey.url, prefix, Clock(), PATIENCE)) for _ in range(2)]
        opened = [await one.reserve([key], [ask]) for one in gateways for _ in range(20)]
        opened += [await one.reserve([slots], [LimitRequest(places=1)]) for one in gateways]
        assert all(one.decision.lacking is None for one in opened)
        valkey.kill()
        refused = [await one.reserve([slots], [LimitRequest(places=1)]) for one in gateways]
        assert [one.decision.of for one in refused] == ["places", "places"]
        alone = []
        for at in range(100):
            gateways[at % 2].spent(key, 0)  # the ledger was read, and is late
            alone.append(await gateways[at % 2].reserve([key], [ask]))
        for one in (*opened[:40], *alone):
            one.by.settle(one.bounds, Settlement(places=-1, money=-one.decision.money, spent=one.decision.money))
        late = [await gateways[at % 2].reserve([key], [ask]) for at in range(100)]
    assert sum(one.decision.money for one in (*opened, *alone, *late)) == 500_000


async def test_a_budget_that_changes_while_valkey_is_away_holds(valkey, prefix):
    """Before the fix, a budget of $0.50 that was lowered to $0.02 still granted $0.25."""
    ask = LimitRequest(money=10_000, least=10_000)
    async with shared(valkey.url, prefix, Clock(), PATIENCE) as limiter:
        valkey.kill()
        for money, granted in ((500_000, 10_000), (20_000, 0), (600_000, 10_000)):
            assert (await limiter.reserve([Limit("key", money=money, period=1)], [ask])).decision.money == granted
            limiter.spent(Limit("key", money=money, period=1), 20_000)


async def test_what_is_spent_while_valkey_is_away_counts_once_although_the_ledger_has_it_too(valkey, prefix):
    """Before the fix, a budget of $0.50 had $0.10 left and not $0.30, and kept it so when Valkey was back."""
    bounds, nothing = [Limit("key", money=500_000, period=1)], [LimitRequest()]
    async with shared(valkey.url, prefix, timeout=PATIENCE) as limiter:
        valkey.kill()
        while (one := await limiter.reserve(bounds, [LimitRequest(money=20_000, least=20_000)])).by is limiter:
            pass
        assert (await limiter.reserve(bounds, nothing)).decision.left[0][3] == 5_000  # of 5 % of the budget
        one.by.settle(one.bounds, Settlement(money=-20_000, spent=20_000))
        limiter.spent(bounds[0], 20_000)
        assert (await limiter.reserve(bounds, nothing)).decision.left[0][3] == 25_000  # after a query of the ledger
        limiter.spent(bounds[0], 240_000)
        assert (await limiter.reserve(bounds, nothing)).decision.left[0][3] == 10_000  # of a part of $0.25
        valkey.start()
        await until_up(limiter)
        assert (await limiter.reserve(bounds, nothing)).decision.left[0][3] == 480_000


async def test_a_gateway_that_alone_loses_valkey_gives_little_money_away(valkey, prefix):
    """Before the fix, a budget of $0.50 spent $0.75: the other gateway grants there what is left of all of it."""
    bounds, asks = [Limit("key", money=500_000, period=1)], [LimitRequest(money=5_000, least=5_000)]
    spent = []
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(TcpProxy(f"127.0.0.1:{valkey.port}"))
        urls = valkey.url, f"redis://{proxy.address}"
        one, other = [await stack.enter_async_context(shared(url, prefix, timeout=PATIENCE)) for url in urls]
        await eventually(lambda: one.gateways == other.gateways == 2)
        proxy.target = "127.0.0.1:9"
        proxy.cut()
        for at in range(150):
            if at == 100:
                other.spent(bounds[0], 400_000)  # the ledger was read, and lacks the last requests of `one`
            for limiter in (one, other):
                result = await limiter.reserve(bounds, asks)
                spent.append(result.decision.money)
                result.by.settle(result.bounds, Settlement(money=-spent[-1], spent=spent[-1]))
    assert 500_000 <= sum(spent) <= 550_000


async def test_a_gateway_whose_clock_is_ahead_refills_no_budget(valkey, prefix):
    """Before the fix, it spent the budget of its day, $0.50 more."""
    today, asks = datetime.now(UTC).toordinal(), [LimitRequest(money=500_000, least=500_000)]
    async with shared(valkey.url, prefix) as right, shared(valkey.url, prefix) as ahead:
        for limiter, days, granted in ((right, 0, 500_000), (ahead, 400, 0)):
            bounds = [Limit("key", money=500_000, period=today + days)]
            assert (await limiter.reserve(bounds, asks)).decision.money == granted
            limiter.settle(bounds, Settlement(money=-granted, spent=granted))
            await limiter.reserve(bounds, [LimitRequest()])


async def test_what_is_no_redis_is_told_once_without_its_password(prefix, caplog):
    async def chatter(reader, writer):
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(chatter, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limiter = RedisLimiter(f"redis://:secret@127.0.0.1:{port}", prefix)

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.endswith("ratelimit.redis")]

    async with server:
        assert (await limiter.reserve([Limit("key", 10)], [LimitRequest(1)])).decision.lacking is None
        await eventually(errors)
        # and tried again
        await asyncio.sleep(0.5)
        await limiter.close()
    assert len(errors()) == 1
    assert f"127.0.0.1:{port}, which keeps the limits, is not usable" in errors()[0]
    assert "secret" not in caplog.text


async def test_the_settings_say_where_limits_are():
    alone = create_limit_check(GatewaySettings(quotas=Quotas(each={"rpm": 1}))).rate_limits.limiter
    assert isinstance(alone, InMemoryLimiter)
    shared_one = create_limit_check(GatewaySettings(redis="redis://127.0.0.1:1")).rate_limits.limiter
    assert isinstance(shared_one, RedisLimiter)
    await shared_one.close()


# -- of one process --------------------------------------------------------------------------------------------------


def test_what_the_ledger_knows_counts_and_never_less_than_was_seen():
    limiter = InMemoryLimiter(Clock())
    key = Limit("key", money=100, period=20)
    limiter.spent(key, 60)
    limiter.spent(key, 40)
    assert limiter.reserve_now([key], [LimitRequest(money=100, least=1)]).decision.money == 40
    limiter.settle([key], Settlement(money=-40, spent=40))
    # what comes late of a period that is over
    key.period = 21
    assert limiter.reserve_now([key], [LimitRequest()]).decision.left[0][3] == 100
    limiter.spent(Limit("key", money=100, period=20), 100)
    assert limiter.reserve_now([key], [LimitRequest()]).decision.left[0][3] == 100


def test_callers_that_come_and_go_take_no_memory():
    clock = Clock()
    limiter = InMemoryLimiter(clock)
    debtor = [Limit("debtor", money=100, period=1)]
    limiter.settle(debtor, Settlement(spent=70))
    tokens = [Limit("with tokens", tokens=1000)]
    limiter.settle(tokens, Settlement(tokens=10_000))
    for at in range(3 * MAX_RECORDS):
        clock.now += 0.01
        limiter.reserve_now([Limit(f"client {at}", 60)], [LimitRequest(1)])
    assert len(limiter._records) <= MAX_RECORDS + 2
    # five minutes repay five thousand of them
    assert limiter.reserve_now(tokens, [LimitRequest()]).decision.left[0][1] == pytest.approx(-4000)
    assert limiter.reserve_now(debtor, [LimitRequest()]).decision.left[0][3] == 30


async def passed(gateways: list[RateLimits], plans: list[list[CallerLimits]], requests) -> int:
    """Return how many requests pass, one after another; each is a gateway, a caller, and True to ask for tokens."""
    count = 0
    for gateway, caller, generates in requests:
        reservation = gateways[gateway].new_reservation(plans[gateway][caller])
        try:
            await reservation.enter()
            if generates:
                await reservation.tokens("m", 1, 1)
            count += 1
        except RateLimitError:
            pass
        reservation.close(Outcome(200, usage=Usage(1, 1)) if generates else Outcome(400))
    return count


RPM = 10
REQUESTS = st.lists(st.tuples(st.just(0), st.integers(0, 2), st.booleans()), min_size=3 * RPM, max_size=60)


@given(REQUESTS, st.sampled_from([None, 1_000_000]))
def test_rpm_holds_whatever_requests_ask_for_tokens(requests, tpm):
    """A caller passes `rpm` times. Callers who share a quota may pass half of it more, which they owe."""
    for callers in (1, 3):
        plans = [CallerLimits([Quota("tenant", RPM, tpm)], f"caller {one}") for one in range(callers)]
        asked = [(0, caller % callers, generates) for _, caller, generates in requests]
        count = asyncio.run(passed([RateLimits(InMemoryLimiter(Clock()))], [plans], asked))
        assert RPM <= count <= (RPM if callers == 1 else RPM + RPM // 2)


@pytest.mark.parametrize("away", [False, True], ids=["Redis", "without Redis"])
async def test_rpm_holds_for_requests_without_tokens_at_several_gateways(valkey, prefix, away):
    async with AsyncExitStack() as stack:
        limiters = [await stack.enter_async_context(shared(valkey.url, prefix, Clock())) for _ in range(4)]
        gateways = [RateLimits(one) for one in limiters]
        for one in (*limiters, *limiters):  # each learns how many they are
            await one.reserve([Limit("other", 9)], [LimitRequest()])
        if away:
            valkey.kill()
        plans = [[CallerLimits([Quota("key", 40)])] for _ in gateways]
        count = await passed(gateways, plans, [(at % 4, 0, False) for at in range(400)])
        assert 40 <= count <= 61  # half more while settlements travel, and what refills meanwhile
