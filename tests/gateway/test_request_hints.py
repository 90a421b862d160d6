"""Fields of a body that schedule, place and record its request."""

from types import SimpleNamespace

from llmops.gateway.generation.app_state import apply_request_hints
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller
from tests.support.gateway_stack import running

TIERS = ("priority", "standard", "flex")


def hinted(caller: Caller, tiers: tuple[str, ...] = TIERS, **fields: object) -> tuple[bool, RequestContext]:
    context = RequestContext("r", caller=caller)
    return apply_request_hints(SimpleNamespace(**fields), context, tiers), context


def test_a_request_is_served_in_a_tier_that_its_key_may_use():
    asked = [("priority", "flex"), ("priority", "priority"), ("", "flex"), ("", "auto"), ("flex", "standard_only")]
    for (own, wanted), served in zip(asked, ("flex", "priority", "flex", "", "flex"), strict=True):
        applied, context = hinted(Caller(tier=own), service_tier=wanted)
        assert (applied, context.scheduling.tier, context.caller.tier, context.warnings) == (True, served, served, [])


def test_a_tier_above_the_keys_is_not_served_and_the_client_is_told():
    said = ["The tier of this key is standard; service_tier cannot ask for a higher one."]
    for own in ("standard", "", "unknown"):
        applied, context = hinted(Caller(tier=own), service_tier="priority")
        told = (applied, context.caller.tier, context.service_tier, context.warnings)
        assert told == (False, own, "default", said)
    # one that the gateway does not have changes nothing
    applied, context = hinted(Caller(tier="gold"), (), service_tier="flex")
    assert (applied, context.caller.tier, context.warnings) == (False, "gold", [])


def test_the_end_user_gets_turns_of_its_own_only_where_the_key_may_say_so():
    fields = {"safety_identifier": "u-1", "user": "old"}
    assert hinted(Caller(share="acme/key"), **fields)[1].scheduling.tenant == "acme"
    reseller = Caller(share="acme/key", scopes=frozenset({"inference", "fairness"}))
    assert hinted(reseller, **fields)[1].scheduling.tenant == "acme/u-1"
    assert hinted(reseller, metadata=SimpleNamespace(user_id="u\n2"))[1].end_user == "u?2"
    assert hinted(reseller, metadata={"user_id": "not Anthropic's"})[1].end_user == ""


async def test_apis_name_the_tier_that_served_and_refuse_a_long_identifier(card, tokenizer):
    async with running(card, tokenizer, tiers={"standard": {}, "flex": {}}) as stack:
        stack.say("Hello")
        chat = await stack.chat(service_tier="flex", safety_identifier="u-1", prompt_cache_key="session-1")
        assert (chat.json()["service_tier"], "x-llmops-ignored" in chat.headers) == ("flex", False)
        body = {"model": "tiny", "input": "Hi", "service_tier": "flex", "prompt_cache_key": "session-1"}
        answer = (await stack.client.post("/v1/responses", json=body)).json()
        assert (answer["service_tier"], answer["prompt_cache_key"]) == ("flex", "session-1")
        refused = await stack.chat(safety_identifier="u" * 65)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "safety_identifier")


async def test_fields_that_an_api_does_not_declare_may_have_any_type(card, tokenizer):
    """Before the fix, an object as `user` of a message failed with 500."""
    message = [{"role": "user", "content": "Hi"}]
    bodies = {
        "/v1/messages": {"messages": message, "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": message},
        "/v1/chat/completions": {"messages": message},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/tokenize": {"prompt": "Hi"},
    }
    names = ("user", "safety_identifier", "service_tier", "prompt_cache_key", "metadata", "messages", "prompt", "input")
    async with running(card, tokenizer, tiers={"standard": {}}) as stack:
        stack.say("Hello")
        for path, body in bodies.items():
            for name in set(names) - set(body):
                for value in ({"a": 1}, [[1]], 7, True):
                    answer = await stack.client.post(path, json={"model": "tiny", **body, name: value})
                    assert answer.status_code in (200, 400), (path, name, value, answer.text)
