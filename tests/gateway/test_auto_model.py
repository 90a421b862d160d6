"""An alias that chooses between a small and a large model: rules, conversations, the trained head."""

import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from llmops.cli.filter_evaluation import Example
from llmops.cli.router_training import train_router
from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError, UnavailableError
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller
from llmops.gateway.routing.auto_model import AutoModel
from llmops.gateway.safety.filters import JUDGED_TENANT
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.schemas.responses_request import ResponsesRequest
from llmops.gateway.settings import RoutedAlias
from tests.gateway.test_aliases import two_models

ALIAS = {"small": "tiny", "large": "other"}
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"format": {"type": "json_object"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def user(*texts: str, **fields) -> ChatRequest:
    messages = [{"role": "user", "content": texts[0]}]
    for text in texts[1:]:
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": text}]
    return ChatRequest.model_validate({"model": "auto", "messages": messages, **fields})


def context(tier: str = "", **headers: str) -> RequestContext:
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return RequestContext("r", caller=Caller(share="a", tier=tier), headers=sent)


def auto(degradation=None, embed=None, **fields) -> AutoModel:
    return AutoModel({"auto": RoutedAlias(**ALIAS, **fields)}, embed, degradation)


@pytest.mark.parametrize(
    ("body", "sent", "model", "reason"),
    [
        (user("Hello"), context(), "tiny", "default"),
        (user("Hello", tools=[TOOL]), context(), "other", "tools"),
        (user("Hello", response_format=SCHEMA), context(), "other", "schema"),
        (user("Hello", guided_regex="a+"), context(), "other", "schema"),
        (user("word " * 2000), context(), "other", "length"),
        (user("What is wrong?\n```\nx = 1\n```"), context(), "other", "code"),
        (user("def f(x):\n  return x"), context(), "other", "code"),
        # code in an earlier turn: a worker that does not know the conversation decides the same
        (user("```x```", "Thanks!"), context(), "other", "code"),
        (user("Hello", tools=[TOOL]), context(x_llmops_quality="low"), "tiny", "quality"),
        (user("Hello"), context(x_llmops_quality="high"), "other", "quality"),
        (user("Hello"), context("gold"), "other", "tier"),
        (ResponsesRequest(model="auto", input="```x```"), context(), "other", "code"),
        (ResponsesRequest(model="auto", input="Hi", text=JSON), context(), "other", "schema"),
        (user("Look:\n\n  \tdef f(x):\n  return x"), context(), "other", "code"),
        (SimpleNamespace(prompt="Once upon a time"), context(), "tiny", "default"),
        (SimpleNamespace(prompt=[[1, 2, 3]]), context(), "tiny", "default"),
    ],
)
async def test_the_rules(body, sent, model, reason):
    decision = await auto(tiers={"gold": "large"}).choose("auto", body, sent)
    assert (decision.models[0], decision.reason) == (model, reason)
    with pytest.raises(InvalidRequestError, match="high or low"):
        await auto().choose("auto", body, context(x_llmops_quality="best"))


async def test_empty_lines_cost_no_more_than_their_length():
    """Before the fix, 8,000 empty lines held the event loop for 0.7 s, and twice as many four times as long."""
    began = time.process_time()
    assert (await auto(prompt_characters=200_000).choose("auto", user("\n" * 100_000), context())).reason == "default"
    assert time.process_time() - began < 1


async def test_a_conversation_keeps_the_large_model():
    model, first = auto(), user("Hello", tools=[TOOL])
    assert (await model.choose("auto", first, context())).models[0] == "other"
    model.record("auto", "other", first, context())
    # neither the lack of tools nor the header moves it down, and no other model may answer
    for sent in (context(), context(x_llmops_quality="low")):
        decision = await model.choose("auto", user("Hello", "Thanks!"), sent)
        assert (decision.models, decision.reason) == (("other",), "conversation")
    assert (await model.choose("auto", user("Another one"), context())).models[0] == "tiny"


async def test_many_conversations_of_a_tenant_leave_others_the_large_model(monkeypatch):
    """Before the fix, they dropped the conversations of all other tenants first."""
    monkeypatch.setattr("llmops.gateway.routing.auto_model.MAX_CONVERSATIONS", 4)
    model = auto()

    async def kept(tenant: str, *texts: str) -> list[bool]:
        who = RequestContext("r", caller=Caller(tenant_id=tenant, share=tenant))
        return [(await model.choose("auto", user(text, "Thanks!"), who)).reason == "conversation" for text in texts]

    for tenant, text in [("b", "Hello"), *[("a", text) for text in "1234567"]]:
        model.record("auto", "other", user(text), RequestContext("r", caller=Caller(tenant_id=tenant, share=tenant)))
    assert await kept("b", "Hello", "1") == [True, False]
    assert await kept("a", *"1234567") == [False] * 4 + [True] * 3


async def test_degraded_mode_moves_new_conversations_only():
    model = auto(SimpleNamespace(level=lambda name: 2 if name == "other" else 0))
    decision = await model.choose("auto", user("Hello", tools=[TOOL]), context())
    assert (decision.models, decision.reason) == (("tiny", "other"), "degraded")
    decision = await model.choose("auto", user("```x```", "Thanks!"), context())
    assert (decision.models, decision.reason) == (("other",), "code")


def vectors_of(texts: list[str]) -> np.ndarray:
    """Return vectors in which hard texts point one way and easy ones another, with noise."""
    rows = np.random.default_rng(len(texts)).normal(0, 0.3, (len(texts), 16))
    rows[:, 0] += [1.0 if "prove" in text else -1.0 for text in texts]
    return rows.astype(np.float32)


async def test_a_trained_head_decides_what_rules_do_not(tmp_path):
    rng = random.Random(1)
    words = [f"{rng.choice(['prove', 'say'])} it {at}" for at in range(400)]
    examples = [Example(text, "large" if "prove" in text else "") for text in words]
    head, report = train_router(examples, "minilm", vectors_of(words), max_missed=0.05)
    assert report.accuracy > 0.9
    assert report.large_missed <= 0.06 * (report.large_missed + report.large_found)
    assert 0.3 < report.saved(0.1) < 0.6
    path, asked = tmp_path / "router.json", []
    path.write_text(json.dumps(head))

    async def embed(name, texts):
        asked.append((JUDGED_TENANT.get(), *texts))
        return vectors_of(texts)

    model = auto(embed=embed, head=path)
    assert (await model.choose("auto", user("say hello"), context())).reason == "default"
    assert (await model.choose("auto", user("prove it"), context())).models[0] == "other"
    # an earlier hard turn keeps the conversation up, and is not embedded again
    assert (await model.choose("auto", user("prove it", "say thanks"), context())).reason == "head"
    assert asked == [("a", "say hello"), ("a", "prove it"), ("a", "say thanks")]

    async def away(name, texts):
        raise UnavailableError("away")

    assert (await auto(embed=away, head=path).choose("auto", user("prove it"), context())).reason == "default"


def test_heads_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(InputError, match=r"router head .* cannot be read .*llmops router train"):
        auto(head=tmp_path / "none.json")
    with pytest.raises(InputError, match="The category 'hate' is not a model"):
        train_router([Example("x", "hate")], "m", np.zeros((1, 2)), max_missed=0.1)
    with pytest.raises(InputError, match="Too few examples for the large model: 0"):
        train_router([Example("x")] * 20, "m", np.zeros((20, 2)), max_missed=0.1)


async def test_a_gateway_routes_each_request_and_says_why(card, tokenizer):
    async with two_models(card, tokenizer, aliases={"auto": ALIAS}) as (first, _):
        hello = [{"role": "user", "content": "Hello"}]
        turn = [*hello, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]

        async def ask(messages, **fields):
            body = {"model": "auto", "messages": messages, **fields}
            answer = await first.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-llmops-model"], answer.headers["x-llmops-route"]

        assert (await ask(hello), await ask(turn)) == (("tiny", "default"), ("tiny", "default"))
        assert await ask(hello, response_format={"type": "json_object"}, max_tokens=5) == ("other", "schema")
        assert await ask(turn) == ("other", "conversation")
        page = (await first.client.get("/metrics")).text
        assert 'llmops_routed_requests_total{alias="auto",model="other",reason="schema"} 1.0' in page
        assert "auto" in {one["id"] for one in (await first.client.get("/v1/models")).json()["data"]}
