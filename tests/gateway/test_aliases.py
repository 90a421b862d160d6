"""Aliases: one name for several models, the first that is served and has room answers."""

import asyncio
import contextlib

from tests.support.gateway_stack import BODIES, CHAT, Stack, in_front_of, running
from tests.support.scripted_triton import ScriptedTriton, Step


@contextlib.asynccontextmanager
async def two_models(card, tokenizer, **settings):
    """A gateway in front of two servers, one with the model `tiny`, one with `other`."""
    first = ScriptedTriton({**card, "max_batch_size": 1}, lambda tensors: [Step(final=True)])
    second = ScriptedTriton({**card, "name": "other"}, lambda tensors: [Step(final=True)])
    async with in_front_of(first, second, **settings) as (client, server):
        pair = Stack(first, client, tokenizer, server), Stack(second, client, tokenizer, server)
        for one, text in zip(pair, ("I am tiny.", "I am other."), strict=True):
            one.say(text)
        yield pair


async def answered_by(stack, path=CHAT, **fields) -> tuple[str | None, str]:
    response = await stack.client.post(path, json={**BODIES[path], **fields, "model": "best"})
    assert response.status_code == 200, response.text
    return response.headers.get("x-llmops-model"), response.text


async def test_every_api_answers_an_alias_and_says_who_did_as_metrics_do(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["absent", "tiny"]}) as stack:
        stack.say("Hello")
        for path, fields in [*((path, {}) for path in BODIES), (CHAT, {"stream": True})]:
            served_by, text = await answered_by(stack, path, **fields)
            assert (served_by, "Hello" in text) == ("tiny", True)
        page = (await stack.client.get("/metrics")).text
        assert ('llm_ttft_seconds_count{model="tiny"} 5.0' in page, 'model="best"' in page) == (True, False)


async def test_a_full_model_is_passed_over(card, tokenizer):
    settings = {"aliases": {"best": ["tiny", "other"]}, "limits": {"queued": 1}, "responses": {"entries": 0}}
    async with two_models(card, tokenizer, **settings) as (first, second):
        served_by, text = await answered_by(first)
        assert (served_by, "I am tiny." in text) == ("tiny", True)
        # answers that do not end fill the batch and the queue of the first model
        first.steps(*[Step((first.tokenizer.encode("x")[0],), wait=0.2) for _ in range(300)])
        body = {**first.chat_body, "stream": True}
        async with first.client.stream("POST", CHAT, json=body), first.client.stream("POST", CHAT, json=body):
            await asyncio.sleep(0.1)
            assert (await first.chat()).status_code == 503
            served_by, text = await answered_by(second)
            assert (served_by, "I am other." in text) == ("other", True)


async def test_an_alias_without_a_model_fails_as_its_last_choice(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["absent", "missing"]}) as stack:
        answer = await stack.chat(model="best")
        assert (answer.status_code, "missing" in answer.json()["error"]["message"]) == (404, True)
        assert (await stack.chat(model="tiny")).headers.get("x-llmops-model") is None


async def test_the_list_of_models_has_aliases_for_those_who_may_use_them(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["absent", "tiny"]}) as stack:
        models = {one["id"]: one for one in (await stack.client.get("/v1/models")).json()["data"]}
        assert models["best"]["alias_of"] == ["absent", "tiny"]
        assert (models["best"]["max_model_len"], models["best"]["ready"]) == (256, True)
        assert (await stack.client.get("/v1/models/best")).json() == models["best"]
