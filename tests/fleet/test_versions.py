"""Versions of a model: how requests are split among them, and what a gateway in front of a real Triton does."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, update

from llmops.gateway.interfaces import Caller
from llmops.gateway.routing.versions.version_table import ServedVersion, VersionTable, conversation_key
from llmops.gateway.schemas.request_fields import CompletionRequest
from llmops.gateway.settings import GatewaySettings
from llmops.store.audit import AuditContext
from llmops.store.database import Store
from llmops.store.factory import open_store
from llmops.store.rollouts import RETIRED, ModelVersion, put_version, read_outcomes
from llmops.store.tables import model_versions, usage_records
from tests.support.gateway_stack import replica_lines, serving
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.replicas import Engines, engines
from tests.support.waiting import eventually

BY = AuditContext("cli:tester", datetime(2026, 11, 25, tzinfo=UTC))


def split(percent: float, **old) -> VersionTable:
    stable = ServedVersion("v1", frozenset(["a:1"]), 100 - percent, **old)
    candidate = ServedVersion("v2", frozenset(["b:1", "dns:b:1"]), percent)
    return VersionTable({"llama": [stable, candidate]}, {("llama", "key-7"): "v2"})


def test_five_percent_of_ten_thousand_conversations_are_five_percent():
    found = Counter(split(5).choose("llama", f"conversation-{at}") for at in range(10_000))
    assert found["v2"] / 10_000 == pytest.approx(0.05, abs=0.005)


@given(st.text(), st.floats(0, 100), st.floats(0, 100))
def test_a_conversation_leaves_the_candidate_only_when_its_weight_falls(conversation, one, other):
    low, high = sorted((one, other))
    before, after = (split(percent).choose("llama", conversation) for percent in (low, high))
    assert (before, after) != ("v2", "v1")


def test_pins_win_over_weights_and_other_models_have_no_version():
    assert [split(0).choose("llama", "any", key) for key in ("key-7", "key-8")] == ["v2", "v1"]
    assert split(50).choose("mistral", "any") == ""


def test_the_version_of_a_replica_is_the_one_that_lists_it():
    table = split(5)
    assert [table.version_of("llama", one) for one in ("a:1", "dns:b:1", "unlisted:1")] == ["v1", "v2", "v1"]
    assert split(100, is_retired=True).version_of("llama", "unlisted:1") is None
    assert table.version_of("mistral", "a:1") == ""


def test_outcomes_are_compared_from_the_start_of_the_replicas_to_the_last_step():
    assert [split(percent).is_judged("llama") for percent in (0, 5, 100)] == [True, True, False]
    assert not split(100, is_retired=True).is_judged("llama")
    assert not split(5).is_judged("mistral")


def message(role: str, content: str) -> SimpleNamespace:
    return SimpleNamespace(role=role, content=content)


def test_the_turns_of_a_conversation_have_one_key():
    caller = Caller(user_id="me")
    turns = [message("system", "Be kind."), message("user", "Hello")]
    later = [*turns, message("assistant", "Hi"), message("user", "And now?")]
    first, second = (conversation_key(SimpleNamespace(messages=one), caller) for one in (turns, later))
    assert first == second != conversation_key(SimpleNamespace(messages=[turns[0], message("user", "Hey")]), caller)
    named = [SimpleNamespace(messages=one, user="u1") for one in (turns, later, [])]
    assert len({conversation_key(one, caller) for one in named}) == 1
    # a field of another API is not looked at
    assert conversation_key(CompletionRequest(model="m", prompt="Hi", messages=7), caller) == f"{caller.owner}\0Hi"


@pytest.fixture(scope="module")
def two(engine_dir: Path) -> Iterator[Engines]:
    with engines(engine_dir, constant(0.005, 0.0, 64, max_batch_size=4), 2) as stage:
        yield stage


@pytest.fixture
async def store(tmp_path: Path):
    async with await open_store(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        yield opened


async def put(store: Store, *versions: ModelVersion) -> None:
    async with store.write() as connection:
        for version in versions:
            await put_version(connection, version, BY.at)
            this = (model_versions.c.model == version.model) & (model_versions.c.name == version.name)
            await connection.execute(update(model_versions).where(this).values(weight=version.weight))


async def ask(client: httpx.AsyncClient, user: str = "me") -> str:
    body = {"model": "mock", "prompt": "hello", "max_tokens": 8, "user": user}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-llmops-version", "")


@pytest.mark.stack
@pytest.mark.xdist_group("own-triton")
async def test_versions_in_front_of_triton(two: Engines, store: Store, tmp_path: Path):
    """Go from no version to two, lose the canary and retire a version, without a failed request."""
    first, second = two.replicas
    old = ModelVersion("mock", "v1", weight=100, created_at=datetime(2026, 1, 1, tzinfo=UTC))
    new = ModelVersion("mock", "v2", replicas=[second], created_at=datetime(2026, 1, 2, tzinfo=UTC))
    outbox = {"outbox": tmp_path / "outbox"}
    settings = GatewaySettings(replicas=[first], store=str(store.location.url), open=True, usage=outbox)
    async with serving(settings) as (client, _):

        async def becomes(wanted: set[str]) -> None:
            async def holds() -> bool:
                lines = await replica_lines(client, "mock")
                return {one["version"] for one in lines if one["state"] == "ready"} == wanted

            await eventually(holds)

        async def answers(wanted: set[str]) -> None:
            async def holds() -> bool:
                return {await ask(client, f"user-{at}") for at in range(8)} == wanted

            await eventually(holds)

        await answers({""})
        await put(store, old, replace(new, weight=0))
        await becomes({"v1", "v2"})
        assert {await ask(client, f"user-{at}") for at in range(8)} == {"v1"}
        await put(store, replace(old, weight=50), replace(new, weight=50))
        await answers({"v1", "v2"})
        assert len({await ask(client, "one-user") for _ in range(6)}) == 1
        # the canary's replicas are not there any longer: each request gets the older version
        await put(store, replace(old, weight=1), replace(new, weight=99, replicas=["127.0.0.1:9"]))
        await answers({"v1"})
        for gone in (replace(old, weight=0), replace(old, weight=0, state=RETIRED)):
            await put(store, gone, replace(new, weight=100))
            await answers({"v2"})
        await becomes({"v2"})
    async with store.read() as connection:
        batches = await read_outcomes(connection, "mock", BY.at)
        billed = set((await connection.execute(select(usage_records.c.version))).scalars())
    outcomes = [one for batch in batches for one in batch.outcomes]
    assert {one["version"] for one in outcomes} == {"v1", "v2"}
    assert all(one["ok"] and one["ttft_s"] > 0 and one["output_tokens"] for one in outcomes)
    assert {"v1", "v2"} <= billed
