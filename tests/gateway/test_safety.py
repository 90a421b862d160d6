"""Safety filters over HTTP: refused prompts, answers that are held, cut or observed, and filters that are away."""

import asyncio
import contextlib
import json
import time
from unittest.mock import AsyncMock

import openai
import pytest
from openai.types import Moderation

from llmops.gateway.api.moderations import OPENAI_CATEGORIES
from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller
from llmops.gateway.safety.policy import create_safety
from llmops.gateway.safety.rules import RuleFilter
from llmops.gateway.safety.services import GuardFilter, ModerationFilter
from llmops.gateway.settings import GuardSettings, SafetySettings
from llmops.gateway.telemetry.metrics import GatewayMetrics
from llmops.store.audit import list_audit_entries
from llmops.store.factory import open_store
from tests.support.gateway_stack import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, running, text_of
from tests.support.pages import Page, PageServer
from tests.support.scripted_triton import Step

pytest.importorskip("re2")

SECRET = "The key is sk-00112233, keep it."
RULE = {"kind": "rules", "patterns": [r"sk-[0-9a-f]{4,16}"], "category": "secrets"}


def safety(mode: str = "hold", **policy):
    return {"filters": {"keys": RULE}, "policy": {"answer": {"keys": mode}, **policy}}


async def finish_of(stack, **fields) -> tuple[str, str]:
    events = await stack.events(**fields)
    chunks = [event for event in events if isinstance(event, dict) and event["choices"]]
    assert events[-1] == "[DONE]"
    return text_of(events), chunks[-1]["choices"][0]["finish_reason"]


async def test_hold_lets_no_byte_of_a_match_out_and_frees_the_engine(card, tokenizer):
    async with running(card, tokenizer, safety=safety()) as stack:
        stack.say(SECRET + " And so on. " * 40, end=False)
        assert await finish_of(stack) == ("The key is ", "content_filter")
        await stack.idle()
        answer = (await stack.chat()).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("The key is ", "content_filter")
        long = "Nothing to see here, and it is a long answer with many words in it."
        stack.say(long)
        assert await finish_of(stack) == (long, "stop")
        page = (await stack.client.get("/metrics")).text
        assert 'llmops_safety_findings_total{action="hold",filter="keys",side="answer"} 2.0' in page
        # what the engine generated for the text is counted
        stack.say(SECRET)
        assert 0 < (await stack.chat()).json()["usage"]["completion_tokens"] <= len(tokenizer.encode(SECRET))


async def test_cut_ends_the_answer_and_observe_only_counts(card, tokenizer):
    async with running(card, tokenizer, safety=safety("cut")) as stack:
        stack.say(SECRET + " And so on. " * 40, end=False)
        text, finish = await finish_of(stack)
        assert finish == "content_filter"
        assert len(text) <= len(SECRET) + 40
        await stack.idle()
    async with running(card, tokenizer, safety=safety("observe")) as stack:
        stack.say(SECRET)
        assert await finish_of(stack) == (SECRET, "stop")
        page = (await stack.client.get("/metrics")).text
        assert 'llmops_safety_findings_total{action="observe",filter="keys",side="answer"} 1.0' in page


async def test_a_prompt_is_refused_by_every_api(card, tokenizer):
    async with running(card, tokenizer, safety=safety(prompt=["keys"])) as stack:
        for path, body in [
            *((path, {"messages": [{"role": "user", "content": SECRET}]}) for path in (CHAT, MESSAGES)),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]}),
            *((COMPLETIONS, {"prompt": prompt}) for prompt in (SECRET, tokenizer.encode(SECRET))),
            (RESPONSES, {"input": SECRET}),
        ]:
            stack.say("Hello")
            answer = await stack.client.post(path, json={**BODIES[path], **body})
            error = answer.json()["error"]
            assert (answer.status_code, "secrets" in error["message"], "sk-0011" in answer.text) == (400, True, False)
            assert path == MESSAGES or error["code"] == "content_policy_violation"
            assert stack.triton.active == 0


async def test_tool_calls_leave_whole_or_not_at_all(card, tokenizer):
    tools = [{"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}]
    ask = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "send"}}}
    async with running({**card, "max_seq_len": 1024}, tokenizer, safety=safety()) as stack:
        stack.say('{"text": "the key is sk-00112233 and some more text that is long enough to flush everything"}')
        events = await stack.events(**ask)
        assert not any(event["choices"][0]["delta"].get("tool_calls") for event in events[:-1])
        assert events[-2]["choices"][0]["finish_reason"] == "content_filter"
        stack.say('{"text": "nothing"}')
        answer = (await stack.chat(**ask)).json()["choices"][0]
        assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"text": "nothing"}


@contextlib.asynccontextmanager
async def moderation_server(verdict):
    """A server of `/v1/moderations`; `verdict` makes the answer to a text."""
    with PageServer(lambda request: verdict(json.loads(request.body)["input"])) as server:
        yield f"{server.url}/v1/moderations"


FORBIDDEN = {"role": "user", "content": "forbidden"}


def verdict_of(text: str) -> Page:
    flagged = "forbidden" in text
    result = {"flagged": flagged, "categories": {"violence": flagged}, "category_scores": {"violence": float(flagged)}}
    return Page(json.dumps({"id": "modr-1", "model": "m", "results": [result]}))


def http_safety(url: str, mode: str, fail: str = "closed", timeout: str = "2s"):
    filters = {"remote": {"kind": "http", "url": url, "timeout": timeout}}
    policy = {"prompt": ["remote"], "answer": {"remote": mode}, "fail": fail}
    return {"filters": filters, "window": 32, "policy": policy}


@contextlib.asynccontextmanager
async def moderated(card, tokenizer, verdict=verdict_of, mode: str = "hold", fail: str = "closed", **settings):
    """A gateway whose texts a service judges."""
    server = moderation_server(verdict)
    async with server as url, running(card, tokenizer, safety=http_safety(url, mode, fail), **settings) as stack:
        yield stack


async def test_a_request_over_its_quota_is_not_judged_and_a_refused_one_uses_none(card, tokenizer):
    """Before the fix, a caller without quota kept a filter's service busy: 120 texts a second, on no bill."""
    judged = []

    def judge(text):
        judged.append(text)
        return verdict_of(text)

    async with moderated(card, tokenizer, judge, "observe", quotas={"each": {"tpm": 100}}) as stack:
        prompts = {COMPLETIONS: {"prompt": "forbidden"}, CHAT: {"messages": [FORBIDDEN]}}
        for path, body in prompts.items():
            for most, status in ((99, 429), (60, 400), (60, 400)):
                answer = await stack.client.post(path, json={"model": "tiny", "max_tokens": most, **body})
                assert answer.status_code == status, answer.text
    assert len(judged) == 4


async def test_a_service_judges_windows_of_the_answer(card, tokenizer):
    clean = "one two three four five six seven eight nine ten " * 3
    async with moderated(card, tokenizer) as stack:
        stack.say(clean + "then the forbidden word" + clean)
        text, finish = await finish_of(stack)
        assert finish == "content_filter"
        assert (clean + "then the forbidden word").startswith(text)
        assert "forbidden" not in text
        assert len(text) >= len(clean) - 32
        stack.say(clean)
        assert await finish_of(stack) == (clean, "stop")
        refused = await stack.chat(messages=[{"role": "user", "content": "a forbidden question"}])
        assert refused.json()["error"]["code"] == "content_policy_violation"
    async with moderated(card, tokenizer, mode="cut") as stack:
        stack.say(clean + "then the forbidden word" + clean + clean)
        text, finish = await finish_of(stack)
        assert finish == "content_filter"
        longest = max(len(tokenizer.decode([one])) for one in tokenizer.encode(clean))
        # the window, two tokens beside it, and the token that was on its way
        assert len(text) <= text.index("forbidden") + len("forbidden") + 32 + 3 * longest


@pytest.mark.parametrize("fail", ["open", "closed"])
async def test_a_service_that_dies_in_the_middle_obeys_fail(card, tokenizer, fail):
    calls = []

    def judge(text):
        calls.append(text)
        # the prompt is judged, and the first window of the answer
        return verdict_of(text) if len(calls) <= 2 else Page('{"error": "boom"}', 500)

    text = "one two three four five six seven eight nine ten " * 3
    async with moderated(card, tokenizer, judge, fail=fail) as stack:
        stack.say(text)
        got, finish = await finish_of(stack)
        prompt = await stack.chat()
        if fail == "open":
            assert (got, finish, prompt.status_code) == (text, "stop", 200)
        else:
            assert (finish, 0 < len(got) < len(text), prompt.status_code) == ("content_filter", True, 503)
            assert prompt.json()["error"]["code"] == "safety_unavailable"
            assert int(prompt.headers["retry-after"]) >= 1
        assert 'llmops_safety_failures_total{filter="remote"}' in (await stack.client.get("/metrics")).text


@pytest.mark.parametrize("answer", [b"<html>no</html>", b"[]", b'{"results": []}', b'{"results": [{"flagged": "x"'])
async def test_a_service_that_answers_nonsense_is_a_filter_that_is_away(card, tokenizer, answer):
    async with moderated(card, tokenizer, lambda text: Page(answer)) as stack:
        assert (await stack.chat()).status_code == 503


async def test_a_category_of_a_service_has_no_unsafe_characters(card, tokenizer):
    """Before the fix, half of a surrogate pair was stored in the audit log, which then could not be read."""
    async with moderated(card, tokenizer, lambda text: Page(json.dumps(found))) as stack:
        for category, kept in (("a\ud800b\0\x1b[2J\u202e", "ab[2J"), ("\udfff", "flagged")):
            found = {"results": [{"flagged": True, "categories": {category: True}}]}
            assert f"({kept})" in (await stack.chat()).json()["error"]["message"]


async def test_moderations_speak_openais_api(card, tokenizer):
    filters = {"keys": RULE, "script": {"kind": "language", "scripts": ["latin"]}}
    async with running(card, tokenizer, safety={"filters": filters}) as stack:
        answer = await stack.client.post("/v1/moderations", json={"input": [SECRET, "Hello", "это совсем другой язык"]})
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        assert [one["flagged"] for one in results] == [True, False, True]
        nothing = dict.fromkeys(OPENAI_CATEGORIES, False)
        assert results[0]["categories"] == {**nothing, "secrets": True, "script": False}
        assert results[2]["category_scores"] == {**nothing, "secrets": 0.0, "script": 1.0}
        unjudged = {key: [] for key in OPENAI_CATEGORIES}
        assert results[1]["category_applied_input_types"] == {**unjudged, "secrets": ["text"], "script": ["text"]}
        Moderation.model_validate(results[1])
        client = openai.AsyncOpenAI(base_url=f"{stack.client.base_url}/v1", api_key="none")
        assert (await client.moderations.create(input=SECRET)).results[0].flagged


async def test_moderations_of_callers_take_turns(card, tokenizer, monkeypatch):
    """Before, they were judged in their order: a caller's flood held up the texts of all others."""
    judged: list[str] = []

    async def judge(self, text: str) -> None:
        judged.append(text)
        await asyncio.sleep(0.02)

    monkeypatch.setattr(ModerationFilter, "judge", judge)
    filters = {"http": {"kind": "http", "url": "http://127.0.0.1:9/v1/moderations"}}
    async with running(card, tokenizer, safety={"filters": filters}) as stack:

        async def ask(key: str, text: str) -> None:
            answer = await stack.client.post("/v1/moderations", json={"input": [text] * 5}, headers={"x-api-key": key})
            assert answer.status_code == 200

        flood = [asyncio.create_task(ask("evil", "flood")) for _ in range(80)]
        while judged.count("flood") < 16:
            await asyncio.sleep(0.01)
        before = len(judged)
        await ask("other", "mine")
        assert len(judged) - before < 160
        await asyncio.gather(*flood)


async def test_prompts_and_answers_of_callers_take_turns():
    """Before, they waited in their order for a connection: a caller's flood held up the texts of all others."""
    texts: list[str] = []

    def judge(text):
        texts.append(text)
        time.sleep(0.05)
        return verdict_of(text)

    async with moderation_server(judge) as url:
        safety = create_safety(SafetySettings(**http_safety(url, "hold", timeout="1m")), GatewayMetrics(), None, None)
        evil, other = Caller(share="evil/1"), Caller(share="other/1")
        flood = [asyncio.create_task(safety.check_prompt(["flood"], evil)) for _ in range(500)]
        while not texts:
            await asyncio.sleep(0.01)
        await safety.check_prompt(["mine"], other)
        await safety.guard(other).judge("my answer", final=True)
        assert texts.index("mine") < 150
        assert texts.index("my answer") < 300
        await asyncio.gather(*flood)
        await safety.close()


async def test_tenants_take_turns_for_the_search_of_texts_with_many_escapes(monkeypatch):
    """Before, they waited in one line: 30 KB for 12 CPU seconds of another tenant's texts."""
    searched = []

    def search(_, text):
        searched.append(text)
        time.sleep(0.02)

    monkeypatch.setattr(RuleFilter, "_is_in", search)
    safety = create_safety(SafetySettings(filters={"a": RULE}, policy={"prompt": ["a"]}), GatewayMetrics(), None, None)
    text = "\\" * 5000
    flood = [asyncio.create_task(safety.check_prompt([text], Caller(share="evil/1"))) for _ in range(60)]
    await asyncio.sleep(0)
    await safety.check_prompt([text], Caller(share="other/1"))
    assert len(searched) < 15
    await asyncio.gather(*flood)


async def test_findings_are_on_record_without_the_text(card, tokenizer, tmp_path):
    store = f"sqlite:///{tmp_path / 'store.db'}"
    async with running(card, tokenizer, store=store, safety=safety(prompt=["keys"])) as stack:
        for _ in range(2):
            asked = await stack.chat(messages=[{"role": "user", "content": SECRET}], safety_identifier="u-1")
            assert asked.status_code == 400
        stack.say(SECRET)
        await stack.chat()
    async with await open_store(store) as opened, opened.read() as connection:
        entries = await list_audit_entries(connection, action="safety.")
    details = [{**entry.detail, "first": None} for entry in entries]
    known = {(entry.actor, entry.action, entry.subject) for entry in entries}
    assert known == {("address:127.0.0.1", "safety.found", "keys")}
    both = {"category": "secrets", "first": None}
    answer = {**both, "side": "answer", "action": "hold", "count": 1}
    prompt = {**both, "side": "prompt", "action": "refused", "end_user": "u-1", "count": 2}
    assert sorted(details, key=len) == [answer, prompt]
    assert "sk-0011" not in str(entries)


GUARD = {"model": "tiny", "prompt": "Is this safe? {text}", "categories": {"S1": "violence"}}


class GuardStack:
    """A model that answers as a guard, and to everything else with `text`."""

    def __init__(self, stack, text: str, verdict=lambda judged: "safe") -> None:
        self.stack, self.judged = stack, []

        def script(tensors):
            prompt = stack.tokenizer.decode(list(tensors["input_ids"]))
            said = text
            if "Is this safe?" in prompt:
                self.judged.append(prompt.partition("Is this safe? ")[2].partition("\n")[0])
                said = verdict(self.judged[-1])
            if said is None:
                return [Step(hang=True)]
            return [*(Step((one,)) for one in stack.tokenizer.encode(said)), Step((0,)), Step(final=True)]

        stack.triton.script = script


def guard_safety(fail: str = "closed", **guard):
    one = {"kind": "model", "guard": {**GUARD, **guard}}
    return {"filters": {"guard": one}, "policy": {"prompt": ["guard"], "answer": {"guard": "hold"}, "fail": fail}}


async def test_a_guard_model_judges_prompts_and_answers_and_not_itself(card, tokenizer):
    async with running({**card, "max_seq_len": 1024}, tokenizer, safety=guard_safety()) as stack:
        guarded = GuardStack(stack, "It is a knife.", lambda text: "unsafe\nS1" if "knife" in text else "safe")
        text, finish = await finish_of(stack)
        assert (text, finish, guarded.judged) == ("", "content_filter", ["Hello", "It is a knife."])
        refused = await stack.chat(messages=[{"role": "user", "content": "Where is a knife?"}])
        assert (refused.status_code, "violence" in refused.json()["error"]["message"]) == (400, True)
        result = (await stack.client.post("/v1/moderations", json={"input": "a knife"})).json()["results"][0]
        assert result["categories"] == {**dict.fromkeys(OPENAI_CATEGORIES, False), "violence": True, "guard": False}


class TenantOfHeader(Check):
    async def before(self, scope, context):
        tenant = context.headers.get(b"x-tenant", b"").decode()
        context.caller = Caller(tenant, tenant, share=f"{tenant}/key")


async def test_what_a_guard_model_read_for_one_tenant_is_in_no_others_cache(card, tokenizer):
    """All texts had one salt: the time of a verdict told whether another tenant's text began so."""
    settings = {"safety": guard_safety(), "cache_scope": "tenant"}
    card["capabilities"]["cache_salt"] = True
    async with running({**card, "max_seq_len": 1024}, tokenizer, checks=[TenantOfHeader()], **settings) as stack:
        GuardStack(stack, "It is a knife.")
        salts = {}
        for tenant in ("acme", "evil"):
            before = len(stack.triton.requests)
            for path, body in ((CHAT, stack.chat_body), ("/v1/moderations", {"input": "a knife"})):
                answer = await stack.client.post(path, json=body, headers={"x-tenant": tenant})
                assert answer.status_code == 200
            salts[tenant] = {tuple(one.get("cache_salt", ())) for one in stack.triton.requests[before:]}
        assert salts["acme"].isdisjoint(salts["evil"])
        assert () not in salts["acme"] | salts["evil"]


async def test_a_guard_model_invents_no_category():
    """Before the fix, a text that had the model write any word made that a category of the audit log."""
    said = {"unsafe\nS1": "violence", "unsafe\nS7": "S7", "unsafe": "guard", "unsafe\n\x1b[2J": "guard"}
    generate = AsyncMock(side_effect=said)
    judge = GuardFilter("guard", "guard", GuardSettings(model="m", categories={"S1": "violence"}), generate)
    assert [(await judge.judge("text")).category for _ in said] == [*said.values()]


@pytest.mark.parametrize("fail", ["open", "closed"])
@pytest.mark.parametrize("verdict", [None, "I cannot say."])
async def test_a_guard_model_that_gives_no_verdict_obeys_fail(card, tokenizer, fail, verdict):
    settings = guard_safety(fail, timeout="0.3s" if verdict is None else "30s")
    async with running({**card, "max_seq_len": 1024}, tokenizer, safety=settings) as stack:
        GuardStack(stack, "Hello!", lambda text: verdict)
        answer = await stack.chat()
        assert answer.status_code == (200 if fail == "open" else 503), answer.text
        if fail == "open":
            assert answer.json()["choices"][0]["message"]["content"] == "Hello!"
        await stack.idle()


def test_a_guard_that_cannot_work_is_named():
    guard = {"model": "x", "prompt": "Is it?"}
    for more, problem in (({}, "either `head` or `guard`"), ({"guard": guard}, "write {text} where it belongs")):
        with pytest.raises(ValueError, match=problem):
            SafetySettings.model_validate({"filters": {"guard": {"kind": "model", **more}}})
