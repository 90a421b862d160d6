"""Aliases: one name for several models, the first that is served and has room answers."""

import asyncio
import contextlib

from tests.support.gateway_stack import END, Stack, in_front_of, running
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


async def answered_by(stack, path="/v1/chat/completions", **body) -> tuple[str | None, str]:
    response = await stack.client.post(path, json={"model": "best", **body})
    assert response.status_code == 200, response.text
    return response.headers.get("x-llmops-model"), response.text


async def test_every_api_answers_an_alias_and_says_who_did(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["absent", "tiny"]}) as stack:
        for path, body in [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "stream": True}),
            ("/v1/completions", {"prompt": "Hello"}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}),
        ]:
            stack.say("Hello")
            served_by, text = await answered_by(stack, path, **body)
            assert served_by == "tiny"
            assert "Hello" in text


async def test_a_full_model_is_passed_over(card, tokenizer):
    settings = {"aliases": {"best": ["tiny", "other"]}, "limits": {"queued": 1}, "responses": {"entries": 0}}
    messages = [{"role": "user", "content": "Hello"}]
    async with two_models(card, tokenizer, **settings) as (first, second):
        served_by, text = await answered_by(first, messages=messages)
        assert served_by == "tiny"
        assert "I am tiny." in text
        # answers that do not end fill the batch and the queue of the first model
        first.steps(*[Step((first.tokenizer.encode("x")[0],), wait=0.2) for _ in range(300)])
        body = {"model": "tiny", "stream": True, "messages": messages}
        async with contextlib.AsyncExitStack() as open_answers:
            for _ in range(2):
                await open_answers.enter_async_context(first.client.stream("POST", "/v1/chat/completions", json=body))
            await asyncio.sleep(0.1)
            assert (await first.chat()).status_code == 503
            served_by, text = await answered_by(second, messages=messages)
            assert served_by == "other"
            assert "I am other." in text


async def test_an_alias_without_a_model_fails_as_its_last_choice(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["absent", "missing"]}) as stack:
        answer = await stack.chat(model="best")
        assert answer.status_code == 404
        assert "missing" in answer.json()["error"]["message"]
        assert (await stack.chat(model="tiny")).headers.get("x-llmops-model") is None


async def test_the_list_of_models_has_aliases_for_those_who_may_use_them(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["absent", "tiny"]}) as stack:
        models = {one["id"]: one for one in (await stack.client.get("/v1/models")).json()["data"]}
        assert models["best"]["alias_of"] == ["absent", "tiny"]
        assert (models["best"]["max_model_len"], models["best"]["ready"]) == (256, True)
        assert (await stack.client.get("/v1/models/best")).json() == models["best"]


async def test_usage_names_the_model_that_answered(card, tokenizer):
    async with running(card, tokenizer, aliases={"best": ["tiny"]}) as stack:
        stack.steps(Step((stack.tokenizer.encode("x")[0],)), Step((END,)), Step(final=True))
        await stack.chat(model="best")
        page = (await stack.client.get("/metrics")).text
        assert 'llm_ttft_seconds_count{model="tiny"} 1.0' in page
        assert 'model="best"' not in page
