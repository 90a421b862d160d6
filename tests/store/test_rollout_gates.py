"""The verdict of a roll-out as Argo Rollouts and Flagger get it: Flagger's documented payloads, Argo's template."""

import base64
from datetime import UTC, datetime
from pathlib import Path

import jsonschema
import pytest
import yaml

from llmops.control.rollouts.schemas import RolloutSettings
from llmops.control.rollouts.state_machine import RolloutEvent, RolloutState, transition
from llmops.gateway import logging_setup
from llmops.store.factory import open_store
from llmops.store.rollouts import ModelVersion, create_rollout, require_open_rollout, save_rollout, save_verdict
from tests.store.control_client import BY, bearer, control, make_key

ONLY_SQLITE = pytest.mark.parametrize("kind", ["sqlite"])
NOW = datetime(2026, 11, 25, tzinfo=UTC)
# https://docs.flagger.app/usage/webhooks
PAYLOAD = {"name": "podinfo", "namespace": "test", "phase": "Progressing", "checksum": "85d557f47b"}
PAYLOAD["metadata"] = {"test": "all", "token": "16688eb5e9f289f1991c"}
ADVANCE = {"eventMessage": "Advance podinfo.test", "eventType": "Normal", "timestamp": "1578607635167"}
EVENT = {**PAYLOAD, "metadata": ADVANCE}
NOTIFICATIONS = {"confirm-rollout", "pre-rollout", "rollout", "post-rollout", "event"}
HOOKS = NOTIFICATIONS | {"confirm-traffic-increase", "confirm-promotion", "rollback"}


async def start(url: str) -> None:
    async with await open_store(url) as store, store.write() as connection:
        version = ModelVersion("llama", "v2", engine="/engine")
        await create_rollout(connection, version, RolloutState.STARTING, RolloutSettings().data(), BY)


async def write(url: str, decision: str | None = None, *events: RolloutEvent) -> None:
    async with await open_store(url) as store, store.write() as connection:
        rollout = await require_open_rollout(connection, "llama")
        for event in events:
            rollout = transition(rollout, event, NOW, f"it was {event}")
            await save_rollout(connection, rollout, BY)
        if decision is not None:
            await save_verdict(connection, rollout, {"decision": decision, "reason": f"A {decision}.", "rows": []})


@ONLY_SQLITE
async def test_repeated_hooks_write_one_line_a_second(url: str, caplog, monkeypatch) -> None:
    """Before the fix, a key that may only read metrics wrote a line with each call."""
    secret, _, _ = await make_key(url, scopes=("metrics",))
    await start(url)
    caplog.set_level("INFO")
    monkeypatch.setattr(logging_setup, "monotonic", lambda: 1000.0)
    async with control(url) as client:
        for _ in range(20):
            sent = {"json": EVENT, "headers": bearer(secret)}
            assert (await client.post("/api/rollouts/flagger/event?model=llama", **sent)).status_code == 200
    assert sum(line.startswith("Flagger called") for line in caplog.messages) <= 1


@ONLY_SQLITE
async def test_flagger_goes_on_as_the_judge_decides(url: str) -> None:
    secret, _, _ = await make_key(url, scopes=("metrics",))
    await start(url)
    async with control(url) as client:

        async def passing() -> set[str]:
            found = set()
            for hook in HOOKS:
                # Flagger sends no headers of its own: Go puts the key of http://flagger:KEY@HOST into this one
                sent = {"json": EVENT if hook == "event" else PAYLOAD, "auth": ("flagger", secret)}
                answer = await client.post(f"/api/rollouts/flagger/{hook}?model=llama", **sent)
                # another status than 409 would be repeated or hidden
                assert answer.status_code in (200, 409), answer.text
                found |= {hook} if answer.status_code == 200 else set()
            return found

        assert await passing() == NOTIFICATIONS
        await write(url, "continue", RolloutEvent.READY)
        assert await passing() == NOTIFICATIONS
        await write(url, "promote")
        assert await passing() == HOOKS - {"rollback"}
        await write(url, "rollback")
        assert await passing() == {"post-rollout", "event", "rollback"}
        await write(url, None, RolloutEvent.ROLLBACK)
        assert await passing() == {"post-rollout", "event", "rollback"}

        path = "/api/rollouts/flagger/confirm-promotion?model=llama"
        answer = await client.post(path, json=PAYLOAD, headers=bearer(secret))
        assert answer.json()["error"]["message"] == "The roll-out of llama: rollback. it was rollback"


@ONLY_SQLITE
async def test_a_verdict_needs_a_key_and_a_roll_out(url: str) -> None:
    secret, _, _ = await make_key(url, scopes=("metrics",))
    other, _, _ = await make_key(url, scopes=("inference",))
    async with control(url) as client:
        path = "/api/rollouts/verdict?model=llama"
        assert (await client.get(path)).status_code == 401
        for wrong in ("Basic", "Basic !", "Basic " + base64.b64encode(b"key:wrong").decode()):
            assert (await client.get(path, headers={"authorization": wrong})).status_code == 401
        assert (await client.get(path, headers=bearer(other))).status_code == 403
        answer = await client.get(path, headers=bearer(secret))
        assert answer.status_code == 404
        assert "llmops rollout start llama" in answer.json()["error"]["message"]
        await start(url)
        await write(url, "promote", RolloutEvent.READY)
        answer = await client.get(path, headers=bearer(secret))
        decided = {"decision": "promote", "reason": "A promote."}
        assert answer.json() == {"model": "llama", "state": "shifting", "percent": 5.0, **decided}
        for hook, body in (("rollout", {}), ("rollout", {"name": 5}), ("other", PAYLOAD)):
            sent = {"json": body, "headers": bearer(secret)}
            assert (await client.post(f"/api/rollouts/flagger/{hook}?model=llama", **sent)).status_code == 400
        # before the fix, PostgreSQL refused this name, and the answer was 500
        assert (await client.get("/api/rollouts/verdict?model=%00", headers=bearer(secret))).status_code == 400


TEXT, COUNT = {"type": "string"}, {"type": "integer"}


def fields(required: tuple[str, ...] = (), **properties) -> dict:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def items(kind: dict) -> dict:
    return {"type": "array", "items": kind}


# the fields of manifests/crds/analysis-template-crd.yaml of Argo Rollouts (9f8d111d, August 2026) that are used here
_LIMITS = ("count", "failureLimit", "inconclusiveLimit", "consecutiveErrorLimit", "consecutiveSuccessLimit")
_WEB = fields(
    ("url",), url=TEXT, method=TEXT, jsonPath=TEXT, timeoutSeconds=COUNT,
    headers=items(fields(("key", "value"), key=TEXT, value=TEXT)),
)  # fmt: skip
_METRIC = fields(
    ("name", "provider"), name=TEXT, interval=TEXT, initialDelay=TEXT, successCondition=TEXT, failureCondition=TEXT,
    **dict.fromkeys(_LIMITS, COUNT),
    provider=fields(web=_WEB, prometheus=fields(address=TEXT, query=TEXT, timeout=COUNT)),
)  # fmt: skip
_SECRET = fields(secretKeyRef=fields(("name", "key"), name=TEXT, key=TEXT))
ANALYSIS_TEMPLATE = fields(
    ("apiVersion", "kind", "metadata", "spec"), metadata=fields(("name",), name=TEXT),
    apiVersion={"const": "argoproj.io/v1alpha1"}, kind={"const": "AnalysisTemplate"},
    spec=fields(
        ("metrics",), metrics=items(_METRIC), args=items(fields(("name",), name=TEXT, value=TEXT, valueFrom=_SECRET))
    ),
)  # fmt: skip


def test_the_analysis_template_has_only_fields_of_argo() -> None:
    file = Path(__file__).parents[2] / "deploy" / "argo-analysis.yaml"
    template = yaml.safe_load(file.read_text())
    jsonschema.validate(template, ANALYSIS_TEMPLATE)
    arguments = {argument["name"] for argument in template["spec"]["args"]}
    assert {part.partition("}}")[0] for part in file.read_text().split("{{args.")[1:]} == arguments
