"""Many who ask at once: processes of one machine, gateways on one Valkey, and a Valkey that goes away."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from limits_conftest import GENEROUS, PATIENCE, Clock, eventually, shared, until_up

from llmops.gateway.callers.limits import table
from llmops.gateway.callers.limits.base import LEASE
from llmops.gateway.callers.limits.buckets import Ask, Bound, Change
from llmops.gateway.callers.limits.check import limits_of
from llmops.gateway.callers.limits.embedded import Embedded
from llmops.gateway.callers.limits.gate import Gate
from llmops.gateway.callers.limits.plan import Plan
from llmops.gateway.callers.limits.redis import Shared
from llmops.gateway.errors import RateLimitError
from llmops.gateway.messages import Outcome, Quota, Usage
from llmops.gateway.settings import GatewaySettings, Quotas

ATTEMPTS = 10_000

# one of several processes: asks `count` times for one token each, and says how many it got, and when it began and
# ended; with a fourth argument time stands still for it
ASKER = """
import json, sys, time
from llmops.gateway.callers.limits.buckets import Ask, Bound
from llmops.gateway.callers.limits.check import limits_of
from llmops.gateway.callers.limits.embedded import Embedded
path, count, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
limiter = Embedded(path, (lambda: 0.0) if sys.argv[4:] else time.monotonic, patience=60)
bounds, asks = [Bound("key", limit)], [Ask(1)]
limiter.reserve_now([], [])
print("ready", flush=True)
sys.stdin.readline()
began, got = time.monotonic(), 0
for _ in range(count):
    reserved = limiter.reserve_now(bounds, asks)
    assert reserved.by is limiter, "the file was not used"
    got += reserved.decision.lacking is None
print(json.dumps([got, began, time.monotonic()]), flush=True)
sys.stdin.readline()
"""


def askers(path: Path, count: int, limit: int, *still: str) -> list[subprocess.Popen]:
    arguments = [sys.executable, "-c", ASKER, str(path), str(count), str(limit), *still]
    started = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    return started


def say(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def test_four_workers_get_the_limit_and_what_refills_and_not_one_more(tmp_path):
    limit = 3000
    processes = askers(tmp_path / "limits", ATTEMPTS // 4, limit)
    try:
        say(processes)
        told = [json.loads(process.stdout.readline()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    seconds = max(ended for _, _, ended in told) - min(began for _, began, _ in told)
    got = sum(count for count, _, _ in told)
    assert 0.99 * limit <= got <= limit + seconds * limit / 60 + 1


async def test_three_gateways_on_one_valkey_get_the_limit_and_what_refills(redis_url, prefix):
    limit = 3000
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(shared(redis_url, prefix)) for _ in range(3)]
        began = time.monotonic()
        asked = await asyncio.gather(
            *(gateways[at % 3].reserve([Bound("key", limit)], [Ask(1)]) for at in range(ATTEMPTS))
        )
        seconds = time.monotonic() - began
    assert all(reserved.by in gateways for reserved in asked)
    got = sum(reserved.decision.lacking is None for reserved in asked)
    assert 0.99 * limit <= got <= limit + seconds * limit / 60 + 1
    waits = [reserved.decision.wait for reserved in asked if reserved.decision.lacking is not None]
    assert 0 < max(waits) <= 60 / limit


async def test_litellm_40291_27736_10555_replicas_do_not_each_have_the_limit(redis_url, prefix):
    """Tokens per minute of one key, asked for at three gateways by turns: all of them know of each other's."""
    async with AsyncExitStack() as stack:
        limiters = [await stack.enter_async_context(shared(redis_url, prefix)) for _ in range(3)]
        gates = [Gate(limiter) for limiter in limiters]
        plan = Plan((Quota("key", rpm=1000, tpm=1000),))
        began, passed = time.monotonic(), 0
        for at in range(30):
            ticket = gates[at % 3].ticket(plan)
            with suppress(RateLimitError):
                await ticket.enter()
                await ticket.tokens("tiny", 60, 40)
                passed += 1
        assert 10 <= passed <= 10 + (time.monotonic() - began) * 10 / 60
        assert all(limiter.up.is_set() for limiter in limiters)


async def test_what_is_asked_in_one_turn_is_one_command(redis_url, prefix):
    from redis.asyncio import Redis

    client = Redis.from_url(redis_url)
    async with shared(redis_url, prefix) as limiter:
        before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        await asyncio.gather(*(limiter.reserve([Bound("key", 100)], [Ask(1)]) for _ in range(50)))
        after = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    await client.aclose()
    assert after - before == 1


async def test_settlements_travel_and_are_not_lost(redis_url, prefix):
    bounds = [Bound("key", 6, places=1)]
    async with shared(redis_url, prefix) as one, shared(redis_url, prefix) as other:
        await one.reserve(bounds, [Ask(6, places=1)])
        refused = await other.reserve(bounds, [Ask(places=1)])
        assert (refused.decision.lacking, refused.decision.of) == (0, "places")
        one.settle(bounds, Change(requests=-5, places=-1))

        async def freed():
            return (await other.reserve(bounds, [Ask(places=1)])).decision.lacking is None

        await eventually(freed)
        assert (await other.reserve(bounds, [Ask(5)])).decision.lacking is None


async def test_a_limit_that_was_lowered_holds_at_once_in_valkey_too(redis_url, prefix):
    async with shared(redis_url, prefix) as limiter:
        await limiter.reserve([Bound("key", 1000, 1000)], [Ask(100, 100)])
        lowered = [Bound("key", 10, 20)]
        requests, tokens, _, _ = (await limiter.reserve(lowered, [Ask()])).decision.left[0]
        assert (requests, tokens) == (10, 20)
        limiter.settle(lowered, Change(-50, -50))
        assert (await limiter.reserve(lowered, [Ask()])).decision.left[0][:2] == [10, 20]


async def test_who_leaves_while_it_is_asked_has_nothing(redis_url, prefix):
    bounds, asks = [Bound("key", 5, places=1)], [Ask(5, places=1)]
    async with shared(redis_url, prefix) as limiter:
        asking = asyncio.create_task(limiter.reserve(bounds, asks))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await limiter.reserve(bounds, [Ask()])
        assert (await limiter.reserve(bounds, asks)).decision.lacking is None


@pytest.mark.parametrize("how", ["kill -9", "SIGSTOP"])
async def test_a_valkey_that_goes_away(valkey, prefix, how):
    """Everybody is answered all the time; this machine's share is a third of the limit while three are known."""
    want = [Bound("key", 300, places=9)], [Ask(1)]
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(shared(valkey.url, prefix, Clock())) for _ in range(3)]
        for gateway in gateways:
            assert (await gateway.reserve(want[0], [Ask(1, places=1)])).by is gateway
        first = gateways[0]
        await first.reserve(*want)
        assert first.machines == 3
        first._patience = PATIENCE
        valkey.kill() if how == "kill -9" else valkey.signal(signal.SIGSTOP)
        asked = [await first.reserve(*want) for _ in range(120)]
        assert all(reserved.by is not first for reserved in asked)
        assert {reserved.bounds[0].requests for reserved in asked} == {100}
        assert sum(reserved.decision.lacking is None for reserved in asked) == 100
        valkey.start() if how == "kill -9" else valkey.signal(signal.SIGCONT)
        first._patience = GENEROUS
        await until_up(first)
        assert (await first.reserve(*want)).by is first

        # what they held they still hold, and nothing twice: as soon as each has given a sign of life
        async def all_held():
            for gateway in gateways:
                gateway.beat()
            return (await first.reserve(want[0], [Ask()])).decision.left[0][2] == 9 - 3

        await eventually(all_held)


async def test_a_valkey_that_is_slow_for_a_moment_is_no_alarm(valkey, prefix, caplog):
    """Who waits is answered by this machine in time; what Valkey gave them too late is given back."""
    bounds, asks = [Bound("key", 300, places=9)], [Ask(100, places=1)]
    limiter = Shared(valkey.url, Embedded(":memory:"), prefix, patience=0.02, give_up=GENEROUS)
    await limiter.start()
    await until_up(limiter)
    process = limiter._process
    valkey.signal(signal.SIGSTOP)
    asked = await asyncio.gather(*(limiter.reserve(bounds, asks) for _ in range(2)))
    assert all(reserved.by is not limiter and reserved.decision.lacking is None for reserved in asked)
    # nobody waits for it any more
    assert not limiter.up.is_set()
    valkey.signal(signal.SIGCONT)
    await until_up(limiter)

    async def all_given_back():
        reserved = await limiter.reserve(bounds, [Ask()])
        requests, _, places, _ = reserved.decision.left[0]
        return reserved.by is limiter and (requests, places) == (300, 9)

    await eventually(all_given_back)
    assert limiter._process == process
    assert not [record for record in caplog.records if record.name.endswith("limits.redis")]
    await limiter.close()


async def test_a_request_is_one_command(redis_url, prefix, monkeypatch):
    """Requests, tokens and places are asked for together, with what the request before has left."""
    from redis.asyncio import Redis

    # on a busy machine a request takes longer than a place that is free waits for the next one
    monkeypatch.setattr("llmops.gateway.callers.limits.redis.HELD", GENEROUS)
    monkeypatch.setattr("llmops.gateway.callers.limits.gate.TICK", GENEROUS)
    client = Redis.from_url(redis_url)

    async def commands() -> int:
        return (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]

    async with shared(redis_url, prefix) as limiter:
        gate = Gate(limiter)
        plan = Plan((Quota("key", rpm=10_000, tpm=10**6, concurrent=100), Quota("tenant", rpm=10_000, tpm=10**6)))

        async def request() -> None:
            ticket = gate.ticket(plan)
            await ticket.enter()
            await ticket.tokens("tiny", 100, 50)
            ticket.close(Outcome(200, "stop", Usage(100, 20)))

        began = time.monotonic()
        # the first one sees how much there is
        await request()
        before = await commands()
        for _ in range(50):
            await request()
        assert await commands() - before == 50
        reserved = await limiter.reserve(plan.before.all, [Ask()] * 2)
        refilled = (time.monotonic() - began) / 60 + 0.01
        (requests, _, places, _), (_, tokens, _, _) = reserved.decision.left
        assert 0 <= requests - (10_000 - 51) <= 10_000 * refilled
        assert 0 <= tokens - (10**6 - 51 * 120) <= 10**6 * refilled
        assert places == 100
    await client.aclose()


async def test_what_is_no_redis_is_told_once_without_its_password(prefix, caplog):
    async def chatter(reader, writer):
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(chatter, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limiter = Shared(f"redis://:secret@127.0.0.1:{port}", Embedded(":memory:"), prefix)

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.endswith("limits.redis")]

    async def told() -> bool:
        return bool(errors())

    async with server:
        reserved = await limiter.reserve([Bound("key", 10)], [Ask(1)])
        assert reserved.decision.lacking is None
        await eventually(told)
        # and tried again
        await asyncio.sleep(0.5)
        await limiter.close()
    assert len(errors()) == 1
    assert f"127.0.0.1:{port} is not usable" in errors()[0]
    assert "secret" not in caplog.text


async def test_an_end_that_comes_as_a_connection_fails_is_an_end(prefix, monkeypatch):
    limiter = Shared("redis://127.0.0.1:1", Embedded(":memory:"), prefix)
    closing: list[asyncio.Task[None]] = []

    async def fails() -> None:
        closing.append(asyncio.create_task(limiter.close()))
        raise ConnectionError("gone")

    async def closed() -> bool:
        return bool(closing) and closing[0].done()

    monkeypatch.setattr(limiter, "_connect", fails)
    await limiter.reserve([Bound("key", 10)], [Ask(1)])
    await eventually(closed)


# -- the embedded one ------------------------------------------------------------------------------------------------


async def test_a_restart_refills_nothing(tmp_path):
    clock = Clock()
    first = Embedded(tmp_path / "limits", clock)
    first.reserve_now([Bound("key", 60)], [Ask(60)])
    await first.close()
    second = Embedded(tmp_path / "limits", clock)
    assert second.reserve_now([Bound("key", 60)], [Ask(1)]).decision.wait == 1.0
    await second.close()


async def test_a_place_that_is_given_back_is_soon_another_processs(tmp_path):
    """Also where the one who had it asks for nothing any more."""
    one, other = Embedded(tmp_path / "limits"), Embedded(tmp_path / "limits")
    bounds, asks = [Bound("key", tokens=10**6, places=1, money=100)], [Ask(0, 500, 1, 60, 60)]
    assert one.reserve_now(bounds, asks).decision.lacking is None
    assert other.reserve_now(bounds, asks).decision.of == "money"
    one.settle(bounds, Change(0, 500, -1, -60, 10))

    async def free():
        return other.reserve_now(bounds, [Ask(places=1)]).decision.lacking is None

    await eventually(free)
    _, tokens, _, money = other.reserve_now(bounds, [Ask()]).decision.left[0]
    assert (money, tokens < 10**6 - 500) == (90, True)
    await one.close()
    await other.close()


async def test_what_a_killed_process_held_is_free_after_its_lease(tmp_path):
    clock = Clock()
    lost, living = Embedded(tmp_path / "limits", clock), Embedded(tmp_path / "limits", clock)
    bounds, asks = [Bound("key", places=2, money=100)], [Ask(places=1, money=50, least=50)]
    for limiter in (lost, living):
        limiter.reserve_now(bounds, asks)
    clock.now += LEASE - 1
    living.beat()
    assert living.reserve_now(bounds, [Ask(places=1)]).decision.of == "places"
    assert living.reserve_now(bounds, [Ask(money=50, least=1)]).decision.of == "money"
    clock.now += 1
    assert living.reserve_now(bounds, asks).decision.lacking is None
    await living.close()
    await lost.close()


async def test_a_file_that_cannot_be_used_stops_nobody(tmp_path, caplog):
    """A process that was stopped in the middle of a reservation holds the lock."""
    clock = Clock()
    holder, limiter = Embedded(tmp_path / "limits", clock), Embedded(tmp_path / "limits", clock)
    want = [Bound("key", 2)], [Ask(1)]
    assert limiter.reserve_now(*want).by is limiter
    holder.reserve_now([], [])
    holder.table.lock()
    alone = [limiter.reserve_now(*want) for _ in range(3)]
    assert [reserved.decision.lacking for reserved in alone] == [None, None, 0]
    assert all(reserved.by is not limiter for reserved in alone)
    holder.table.unlock()
    clock.now += 1
    assert limiter.reserve_now(*want).by is limiter
    assert caplog.text.count("cannot be used") == 1
    await holder.close()
    await limiter.close()


def test_whoever_is_killed_in_the_middle_leaves_a_table_that_holds(tmp_path):
    """Processes that ask for all they can get and are killed while they do: what the others got is never too much."""
    limit, path = 10**6, tmp_path / "limits"
    limiter = Embedded(path, Clock(), patience=60)

    def left() -> float:
        reserved = limiter.reserve_now([Bound("key", limit)], [Ask()])
        assert reserved.by is limiter
        return reserved.decision.left[0][0]

    for times in range(1, 4):
        processes = askers(path, 10**6, limit, "time stands still")
        say(processes)
        while left() > limit - 1000 * times:
            time.sleep(0.001)
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        # each of them may have taken one that it was not told of
        assert 0 <= left() <= limit - 1000 * times


async def test_a_disk_that_is_full_stops_nobody(tmp_path, caplog, monkeypatch):
    """What the table needs is taken when it is made: memory that is missing later would end the process."""
    monkeypatch.setattr("os.pwrite", lambda file, what, at: 4096)
    limiter = Embedded(tmp_path / "limits")
    assert limiter.reserve_now([Bound("key", 2)], [Ask(1)]).decision.lacking is None
    assert "No space left on device" in caplog.text
    assert (tmp_path / "limits").stat().st_size == 0
    await limiter.close()


def test_a_table_that_is_full_forgets_what_is_missed_least(tmp_path, monkeypatch):
    """Sixteen names share a group; of one too many, that goes which is full again soonest."""
    monkeypatch.setattr(table, "GROUPS", 1)
    limiter = Embedded(tmp_path / "limits", Clock())
    for at in range(16):
        limiter.reserve_now([Bound(f"key-{at}", 600)], [Ask(60 if at == 5 else 300)])
    limiter.reserve_now([Bound("key-new", 600)], [Ask(300)])

    def left(name: str) -> float:
        return limiter.reserve_now([Bound(name, 600)], [Ask()]).decision.left[0][0]

    assert [left(f"key-{at}") for at in (*range(5), *range(6, 16))] == [300] * 15
    assert left("key-new") == 300


async def test_a_file_that_is_none(tmp_path, caplog):
    (tmp_path / "limits").write_bytes(b"not a database, but long enough to be looked at" * 100)
    limiter = Embedded(tmp_path / "limits")
    assert limiter.reserve_now([Bound("key", 2)], [Ask(1)]).decision.lacking is None
    assert "it is another program's file" in caplog.text
    await limiter.close()


async def test_what_the_ledger_knows_counts_and_never_less_than_was_seen(tmp_path):
    limiter = Embedded(tmp_path / "limits", Clock())
    key = Bound("key", money=100, period=20)
    limiter.spent(key, 60)
    limiter.spent(key, 40)
    assert limiter.reserve_now([key], [Ask(money=100, least=1)]).decision.money == 40
    limiter.settle([key], Change(money=-40, spent=40))
    limiter.beat()
    # what comes late of a period that is over
    key.period = 21
    assert limiter.reserve_now([key], [Ask()]).decision.left[0][3] == 100
    limiter.spent(Bound("key", money=100, period=20), 100)
    assert limiter.reserve_now([key], [Ask()]).decision.left[0][3] == 100
    await limiter.close()


async def test_gateways_of_two_versions_keep_apart(tmp_path, monkeypatch):
    """While one takes the place of the other both run: neither reads what the other means otherwise."""
    monkeypatch.setattr("llmops.gateway.callers.limits.check.folder", lambda: tmp_path)
    named = limits_of(GatewaySettings(port=8000, quotas=Quotas(each={"rpm": 1})))
    older = tmp_path / f"{hashlib.sha256(b'127.0.0.1:8000').hexdigest()[:16]}.limits"
    older.write_bytes(b"llmops limits 1\n" + bytes(1000))
    named.gate.limiter.reserve_now([], [])
    assert {path.name for path in tmp_path.iterdir()} == {older.name, f"{older.stem}.2.limits"}
    assert older.read_bytes() == b"llmops limits 1\n" + bytes(1000)
    await named.gate.close()
