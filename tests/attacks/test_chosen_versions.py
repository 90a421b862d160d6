"""Attack: a caller looks for names of conversations that a new version answers, and behaves badly only there."""

from collections import Counter
from datetime import UTC, datetime

from sqlalchemy import update

from llmops.gateway.routing.versions.outcome_check import MIN_OWNER_REQUESTS
from llmops.gateway.settings import GatewaySettings
from llmops.store.factory import open_store
from llmops.store.rollouts import ModelVersion, put_version, read_outcomes
from llmops.store.tables import model_versions
from tests.attacks.harness import record
from tests.support.gateway_stack import END, serving
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.waiting import eventually

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


async def test_a_caller_that_looks_for_the_new_version_does_not_judge_it(card, tokenizer, tmp_path):
    """Before the fix, answers cut at the caller's own `max_tokens` rolled a healthy version back."""

    def script(tensors: dict) -> list[Step]:
        return [Step((5,)), *[Step((END,))] * (tensors["request_output_len"][0] > 1), Step(final=True)]

    tritons = [ScriptedTriton(card, script) for _ in range(2)]
    for triton in tritons:
        await triton.start()
    old, new = (f"127.0.0.1:{triton.port}" for triton in tritons)
    async with await open_store(f"sqlite:///{tmp_path}/store.db") as store:
        async with store.write() as connection:
            for name, weight, replicas in (("v1", 80, []), ("v2", 20, [new])):
                version = ModelVersion("tiny", name, replicas=replicas, created_at=BEGIN.replace(day=int(name[1])))
                await put_version(connection, version, BEGIN)
                this = model_versions.c.name == name
                await connection.execute(update(model_versions).where(this).values(weight=weight))
        settings = GatewaySettings(replicas=[old], store=str(store.location.url), open=True, usage={"outbox": tmp_path})
        async with serving(settings) as (client, _):

            async def ask(key: str, user: str, tokens: int = 8) -> str:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": tokens, "user": user}
                answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                return answer.headers.get("x-llmops-version", "")

            async def both_answer() -> bool:
                return {await ask("other", f"user-{at}") for at in range(20)} == {"v1", "v2"}

            await eventually(both_answer)
            found = [name for name in (f"user-{at}" for at in range(40)) if await ask("attacker", name) == "v2"]
            for at in range(3 * MIN_OWNER_REQUESTS):
                assert await ask("attacker", found[at % len(found)], tokens=1) == "v2"
                await ask("honest", f"user-{at}")
        async with store.read() as connection:
            batches = await read_outcomes(connection, "tiny", BEGIN)
    finishes = Counter((one["version"], one["finish_reason"]) for batch in batches for one in batch.outcomes)
    record(f"{finishes['v2', 'length']} outcomes of the attacker, {finishes['v2', 'stop']} of others")
    # of 90; as many count as an owner with a few long conversations may have
    assert 0 < finishes["v2", "length"] < 1.5 * MIN_OWNER_REQUESTS
    assert finishes["v2", "stop"] > 10
    for triton in tritons:
        await triton.stop()
