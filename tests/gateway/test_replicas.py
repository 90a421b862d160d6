"""Several servers as one model, over HTTP: what a client sees when replicas differ, fail and come and go."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmops.gateway.routing import failover
from llmops.gateway.routing.replicas.pool_registry import VersionSource
from llmops.gateway.routing.replicas.replica_metrics import REPLICA_STATES
from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import END, card_of, in_front_of, replica_lines, serving
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.waiting import GENEROUS, eventually

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def card(tokenizer_dir, tokenizer):
    return {**card_of(tokenizer_dir, tokenizer), "engine": "e" * 64, "tokenizer": "t" * 64, "max_batch_size": 4}


def saying(*tokens: int):
    return lambda tensors: [*(Step((one,)) for one in tokens), Step((END,)), Step(final=True)]


def failing(text: str, *tokens: int):
    return lambda tensors: [*(Step((one,)) for one in tokens), Step(error=text, final=True)]


@contextlib.asynccontextmanager
async def gateway(*tritons: ScriptedTriton, states=("ready", "ready"), **settings):
    """A gateway in front of these servers, as soon as they have these states."""
    async with in_front_of(*tritons, **settings) as (client, _):
        await become(client, **{str(one.port): state for one, state in zip(tritons, states, strict=False)})
        yield client


async def replicas(client) -> dict[str, dict]:
    return {line["replica"].rpartition(":")[2]: line for line in await replica_lines(client)}


async def become(client, **wanted: str) -> None:
    async def holds() -> bool:
        return {port: line["state"] for port, line in (await replicas(client)).items()} == wanted

    await eventually(holds)


async def counted(client) -> dict[str, float]:
    """Replicas by state, as /metrics has them."""
    page = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = [sample for family in page for sample in family.samples if sample.name == "llmops_replicas"]
    assert {sample.labels["model"] for sample in samples} == {"tiny"}
    assert {sample.labels["state"] for sample in samples} == set(REPLICA_STATES)
    return {sample.labels["state"]: sample.value for sample in samples if sample.value}


async def test_readiness_and_capacity_are_sums(card):
    first, second = ScriptedTriton(card, saying(5)), ScriptedTriton(card, saying(5))
    async with gateway(first, second) as client:
        found = (await client.get("/v1/models/tiny")).json()
        assert (found["ready"], found["replicas"]) == (True, {"ready": 2, "total": 2, "measured": 2})
        assert found["capacity"]["sequences"] == 8
        second.engine_ready = False
        await become(client, **{str(first.port): "ready", str(second.port): "gone"})
        found = (await client.get("/v1/models/tiny")).json()
        assert (found["ready"], found["replicas"]) == (True, {"ready": 1, "total": 2, "measured": 2})
        assert (found["capacity"]["sequences"], await counted(client)) == (4, {"ready": 1, "gone": 1})
        page = text_string_to_metric_families((await client.get("/metrics")).text)
        info = [sample.labels for family in page if family.name == "llmops_replica_info" for sample in family.samples]
        assert {(one["model"], one["replica"], one["source"]) for one in info} == {
            ("tiny", line, "measured") for line in {f"127.0.0.1:{one.port}" for one in (first, second)}
        }
        assert {line["source"] for line in (await replicas(client)).values()} == {"measured"}
        await second.stop()

        async def told() -> bool:
            (one,) = (await client.get("/replicas")).json()["gateways"]
            return one["unreached"] == {f"127.0.0.1:{second.port}": "Triton cannot be reached. Try again later."}

        await eventually(told)


@pytest.mark.parametrize("text", ["drain: the engine is shutting down", "queue: as many wait"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_its_first_token_is_asked_of_another(card, stream, text):
    def answer(tensors):
        """Fail the first request, whichever replica it reaches: among equal ones the gateway draws."""
        return (failing(text) if len(first.requests) + len(second.requests) == 1 else saying(5, 6))(tensors)

    first, second = ScriptedTriton(card, answer), ScriptedTriton(card, answer)
    async with gateway(first, second) as client:
        got = await client.post("/v1/chat/completions", json={**BODY, "stream": stream})
        assert (got.status_code, "error" in got.text) == (200, False)
        assert (len(first.requests), len(second.requests)) == (1, 1)


@pytest.mark.parametrize(("text", "status"), [("queue: as many wait", 503), ("seed: not supported here", 400)])
async def test_what_fails_everywhere_is_asked_of_each_and_what_an_engine_refuses_only_once(card, text, status):
    first, second = (ScriptedTriton(card, failing(text)) for _ in range(2))
    async with gateway(first, second) as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert (answer.status_code, "overloaded" in answer.text) == (status, status == 503)
        asked = sorted(len(one.requests) for one in (first, second))
        assert asked[0] > 0 if status == 503 else asked == [0, 1]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"engine": "f" * 64}, "another engine"),
        ({"tokenizer": "u" * 64, "vocab_size": 300}, "another tokenizer, another vocab_size"),
        ({"max_seq_len": 128}, "another max_seq_len"),
        ({"engine": "", "end_ids": [1]}, "another end_ids"),
    ],
)
async def test_replicas_that_differ_are_not_mixed(card, caplog, other, said):
    first, second = ScriptedTriton(card, saying(5)), ScriptedTriton({**card, **other}, saying(6))
    with caplog.at_level(logging.WARNING):
        async with gateway(first, second, states=("ready", "gone")) as client:
            for _ in range(4):
                assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
            assert (len(first.requests), len(second.requests)) == (4, 0)
            why = f"it has {said}, so it is no replica of tiny on 127.0.0.1:{first.port}"
            assert (await replicas(client))[str(second.port)]["problem"] == why
            second.card = card
            await become(client, **{str(first.port): "ready", str(second.port): "ready"})
    warned = [record.getMessage() for record in caplog.records if "gets no requests for" in record.getMessage()]
    assert warned == [f"Replica 127.0.0.1:{second.port} gets no requests for model tiny: {why}"]


async def test_another_contract_is_refused_and_the_others_serve(card):
    first, second = ScriptedTriton(card, saying(5)), ScriptedTriton({**card, "contract": 1}, saying(6))
    async with gateway(first, second, states=("ready",)) as client:
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_the_same_address_twice_is_one_replica(card):
    triton = ScriptedTriton(card, saying(5))
    async with gateway(triton, triton) as client:
        assert (await client.get("/v1/models/tiny")).json()["replicas"] == {"ready": 1, "total": 1, "measured": 1}


async def test_an_adapter_goes_where_it_is_loaded(card):
    with_adapter = {**card, "adapters": [{"name": "french", "id": 3}]}
    first, second = ScriptedTriton(card, saying(5)), ScriptedTriton(with_adapter, saying(6))
    async with gateway(first, second) as client:
        for _ in range(3):
            assert (await client.post("/v1/chat/completions", json={**BODY, "model": "french"})).status_code == 200
        assert (len(first.requests), len(second.requests)) == (0, 3)


async def test_without_replicas_there_is_nothing_to_show(stack):
    assert (await stack.client.get("/replicas")).status_code == 404
    assert "replicas" not in (await stack.client.get("/v1/models/tiny")).json()
    assert await counted(stack.client) == {"ready": 1}


class Names:
    """A DNS whose name `llamas` has the addresses of these servers."""

    def __init__(self) -> None:
        self.known: list[ScriptedTriton] = []
        self.lookups = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        assert host == "llamas"
        self.lookups += 1
        return [one.address for one in self.known]


@pytest.fixture
def dns(monkeypatch) -> Names:
    made = Names()
    monkeypatch.setattr("llmops.gateway.routing.discovery.resolve_addresses", made.resolve)
    monkeypatch.setattr("llmops.gateway.routing.discovery.ADDRESS_HOLD_TIME", 0.3)
    return made


async def test_a_replica_that_leaves_dns_is_left_and_its_metrics_with_it(card, dns):
    first, second = ScriptedTriton(card, saying(5)), ScriptedTriton(card, saying(6))
    async with first, second:
        dns.known = [first]
        async with serving(GatewaySettings(replicas=["dns:llamas:1"], refresh="0.1s")) as (client, _):
            await become(client, **{str(first.port): "ready"})
            dns.known = [first, second]
            await become(client, **{str(first.port): "ready", str(second.port): "ready"})
            text = (await client.get("/metrics")).text
            assert f'llmops_server_reachable{{server="{first.address}"}} 1.0' in text
            dns.known = [second]
            await become(client, **{str(second.port): "ready"})
            text = (await client.get("/metrics")).text
            assert f"127.0.0.1:{first.port}" not in text
            assert f'llmops_server_reachable{{server="127.0.0.1:{second.port}"}} 1.0' in text
            dns.known = []
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
            await become(client, **{str(second.port): "ready"})


async def test_an_answer_of_a_retired_version_does_not_wait_for_a_replica(card, monkeypatch):
    """Before, it waited for ten seconds after `--drain-timeout`, although no replica could come."""
    monkeypatch.setattr(failover, "SEARCH_TIMEOUT", 10 * GENEROUS)
    stopped = asyncio.Event()

    async def held(tensors: object) -> AsyncIterator[Step]:
        yield Step((5,))
        await stopped.wait()
        yield Step(error="stopped", final=True)

    first, second = ScriptedTriton(card, held), ScriptedTriton(card, saying(6))
    async with first, second:
        versions = {first.address: "v1", second.address: "v2"}
        monkeypatch.setattr(VersionSource, "version_of", lambda _, model, replica: versions.get(replica))
        for order in ("names", "preferred"):
            monkeypatch.setattr(VersionSource, order, lambda _, model: list(versions.values()))
        async with gateway(first, second, refresh="0.05s") as client:
            answer = asyncio.create_task(client.post("/v1/chat/completions", json=BODY, timeout=GENEROUS))
            await eventually(lambda: first.active == 1)
            del versions[first.address]
            await become(client, **{str(second.port): "ready"})
            stopped.set()
            assert (await answer).status_code == 500


async def test_an_answer_ends_on_a_replica_that_has_left(card, dns):
    leaves = asyncio.Event()

    async def held(tensors: object) -> AsyncIterator[Step]:
        yield Step((5,))
        await leaves.wait()
        for _ in range(3):
            yield Step((5,))
        yield Step((END,))
        yield Step(final=True)

    first, second = ScriptedTriton(card, held), ScriptedTriton(card, saying(6))
    dns.known = [first]
    async with first, second, serving(GatewaySettings(replicas=["dns:llamas:1"], refresh="0.05s")) as (client, _):
        await become(client, **{str(first.port): "ready"})
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await eventually(lambda: first.active == 1)
        dns.known = [second]
        await become(client, **{str(second.port): "ready"})
        before = dns.lookups
        await eventually(lambda: dns.lookups > before + 5)
        leaves.set()
        done = (await answer).json()
        assert done["usage"]["completion_tokens"] == 4, done
