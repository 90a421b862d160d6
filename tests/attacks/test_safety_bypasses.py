"""Attacks on safety filters: a text reaches the model, or the client, where no filter looks."""

import asyncio
import json
import threading
from typing import Any

import pytest

from llmops.gateway.safety.filters import JUDGED_TENANT, Finding, TextFilter
from llmops.gateway.safety.rules import RuleFilter, rule_filter
from llmops.gateway.safety.services import GuardFilter
from llmops.gateway.safety.stream_guard import StreamGuard, WindowStage
from llmops.gateway.settings import GuardSettings
from tests.attacks.harness import record
from tests.support.gateway_stack import Stack, card_of, running
from tests.support.tokenizer_files import TEMPLATE, write_tokenizer

pytest.importorskip("re2")

SECRET = "sk-0123456789abcdef"
SAFETY = {
    "filters": {"keys": {"kind": "rules", "patterns": ["sk-[0-9a-f]{16,32}"], "words": ["is"]}},
    "policy": {"prompt": ["keys"], "answer": {"keys": "hold"}},
}
USER = {"role": "user", "content": "Hello"}
CALL = {"name": "f", "arguments": "{}"}


def said(**fields: Any) -> dict[str, Any]:
    """A request with a message of the assistant that has these fields."""
    return {"messages": [USER, {"role": "assistant", **fields}, USER]}


def called(**function: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {**CALL, **function}}
    messages = said(content=None, tool_calls=[call])["messages"]
    return {"messages": [*messages[:2], {"role": "tool", "tool_call_id": "c", "content": "x"}, USER]}


#: Requests whose secret the template of the test shows, or another template might.
HIDDEN = {
    "refusal": said(content=None, refusal=SECRET),
    "refusal as a part": said(content=[{"type": "refusal", "refusal": SECRET}]),
    "reasoning": said(content="x", reasoning=SECRET),
    "name of a call": called(name=SECRET),
    # templates show what the JSON says
    "escapes in a call": called(arguments=json.dumps({"a": SECRET}).replace("sk-", "\\u0073k-")),
    "tool": {"tools": [{"type": "function", "function": {"name": "f", "description": SECRET}}]},
    "document": {"documents": [{"text": SECRET}]},
    "variable of the template": {"chat_template_kwargs": {"x": SECRET}},
}


async def test_no_field_of_a_request_is_hidden_from_filters_of_prompts(card, tokenizer):
    async with running({**card, "max_seq_len": 4096}, tokenizer, safety=SAFETY) as stack:
        stack.say("fine")
        answered = {name: (await stack.chat(**fields)).status_code for name, fields in HIDDEN.items()}
        record(f"answered {sum(status == 200 for status in answered.values())} of {len(HIDDEN)} hidden texts")
        assert answered == dict.fromkeys(HIDDEN, 400)
        assert not stack.triton.requests


async def choice_of(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    answer = await stack.client.post(path, json={"model": "tiny", "max_tokens": 60, **body})
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


async def test_an_answer_that_completes_the_clients_text_is_a_match(card, tokenizer):
    begun, rest = f"the key {SECRET[:9]}", f"{SECRET[9:]} and more text behind it"
    async with running(card, tokenizer, safety=SAFETY) as stack:
        stack.say(rest)
        messages = [USER, {"role": "assistant", "content": begun}]
        chat = await choice_of(stack, "/v1/chat/completions", messages=messages, continue_final_message=True)
        assert (chat["message"]["content"], chat["finish_reason"]) == ("", "content_filter")
        text = await choice_of(stack, "/v1/completions", prompt=begun)
        assert (text["text"], text["finish_reason"]) == ("", "content_filter")


async def test_log_probabilities_show_no_token_that_is_held(card, tokenizer):
    # the token " is" begins with a space, which leaves before the match
    assert " is" in [tokenizer.decode([token]) for token in tokenizer.encode("the capital is")]
    async with running(card, tokenizer, safety=SAFETY) as stack:
        stack.say("the capital is here, and this is a long answer")
        choice = await choice_of(stack, "/v1/chat/completions", messages=[USER], logprobs=True)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("the capital ", "content_filter")
        assert "is" not in "".join(one["token"] for one in choice["logprobs"]["content"])


class Slow(TextFilter):
    """A filter whose verdict comes after the answer's last token."""

    name, categories = "slow", ("bad",)

    async def judge(self, text: str) -> Finding | None:
        return Finding("slow", "bad") if "bad" in text else None


async def test_the_last_window_is_judged_although_no_text_follows_it():
    found: list[Finding] = []
    guard = StreamGuard([WindowStage(Slow(), "observe", 16, fail_open=False)], lambda one, mode: found.append(one))
    await guard.judge("a text with bad in it", final=False)
    await guard.judge("", final=True)
    assert [one.category for one in found] == ["bad"]


CALLS = {
    "JSON": '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>',
    "JSON in JSON": '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"%s\\"}"}</tool_call>',
    "structured output": '{"a": "%s"}',
}
ESCAPED = {
    "one letter": SECRET.replace("s", r"\u0073"),
    "every letter": "".join(f"\\u{ord(letter):04x}" for letter in SECRET),
    "twice": SECRET.replace("s", r"\\u0073"),
    "a line before a word": r"x\nis",
}


@pytest.mark.parametrize("form", CALLS)
async def test_escapes_in_an_answer_hide_no_match(tokenizer, tmp_path, form):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + TEMPLATE)
    card = {**card_of(tmp_path, tokenizer), "max_seq_len": 4096}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with running(card, tokenizer, safety=SAFETY) as stack:
        for name, text in ESCAPED.items():
            stack.say(CALLS[form] % text)
            for stream in (False, True):
                answer = (await stack.chat(tools=tools, max_tokens=300, stream=stream)).text
                record(f"{form}, {name}: {'content_filter' in answer}")
                assert '"content_filter"' in answer, (name, answer)
                assert "0123456789abcdef" not in answer
                assert "u0066" not in answer


async def test_findings_of_one_caller_write_few_lines(card, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr("llmops.gateway.safety.policy.LOG_INTERVAL", 1000.0)
    async with running(card, tokenizer, safety=SAFETY) as stack:
        for number in range(20):
            messages = [{"role": "user", "content": f"{SECRET} {number}"}]
            assert (await stack.chat(messages=messages, safety_identifier=str(number))).status_code == 400
    lines = [line for line in caplog.messages if line.startswith("Safety:")]
    record(f"{len(lines)} lines for 20 findings")
    assert len(lines) == 1


def slow_guard() -> tuple[GuardFilter, list[str]]:
    """Return a guard that takes 10 ms for a passage, and the passages that its model was asked about."""
    judged = []

    async def generate(_model, passage, _tokens):
        judged.append(passage)
        await asyncio.sleep(0.01)
        return "safe"

    return GuardFilter("g", "unsafe", GuardSettings(model="m", timeout="60s"), generate), judged


async def test_a_long_text_holds_up_no_other_before_a_guard():
    """Before the fix, all passages of four long texts came first: others got 503, or passed unread, for 5 s."""
    guard, judged = slow_guard()
    long = [asyncio.create_task(guard.judge("word " * 50_000)) for _ in range(4)]
    await asyncio.sleep(0)
    await guard.judge("hello")
    assert len(judged) < 30
    long.pop().cancel()
    assert await asyncio.gather(*long) == [None] * 3
    await asyncio.gather(*(guard.judge("hello") for _ in range(20)))


async def test_many_texts_of_a_tenant_hold_up_no_other_tenant_s_before_a_guard():
    """Before the fix, a text waited for one passage of each: at 0.8 s a verdict, others got 503."""
    guard, judged = slow_guard()
    JUDGED_TENANT.set("evil")
    many = [asyncio.create_task(guard.judge("word " * 5000)) for _ in range(60)]
    await asyncio.sleep(0)
    JUDGED_TENANT.set("other")
    await guard.judge("hello")
    assert len(judged) < 30
    await asyncio.gather(*many)


async def test_rules_search_long_texts_in_threads_and_longer_ones_apart(monkeypatch):
    """Before the fix, 2,000 words held the event loop for 1.5 s per 500,000 characters."""
    rules, threads, search = rule_filter("r", "secret", [], [SECRET], False), [], RuleFilter._search

    def noted(self, text, start):
        threads.append(threading.current_thread().name.partition("_")[0])
        return search(self, text, start)

    monkeypatch.setattr(RuleFilter, "_search", noted)
    for characters in (4000, 5000, 100_000):
        assert await rules.judge(f"{'word ' * (characters // 5)} {SECRET}")
    assert threads == ["MainThread", "llmops-rules", "llmops-long-rules"]
