"""Conversations over HTTP: stored turns, branches, answers that outlive their connection, and whose they are."""

import asyncio
import json
import time

import openai
import pytest
from sqlalchemy.exc import OperationalError

from llmops.gateway.api.conversations import EXPORT_PIECE
from llmops.gateway.conversations import event_replay
from llmops.gateway.settings import GatewaySettings
from llmops.store import conversations as store
from tests.support.gateway_stack import BODIES, RESPONSES, Stack, running, serving
from tests.support.scripted_triton import Step
from tests.support.waiting import GENEROUS, eventually

CHAT, CHATS = "/api/chat/completions", "/api/conversations"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


class Chats:
    """A gateway with a store, and what a chat page does with it."""

    def __init__(self, stack: Stack) -> None:
        self.client, self.triton, self.tokenizer, self.say = stack.client, stack.triton, stack.tokenizer, stack.say

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.triton.requests[-1]["input_ids"])

    async def new(self, **fields) -> str:
        return (await self.client.post(CHATS, json=fields)).json()["id"]

    async def get(self, conversation: str) -> dict:
        return (await self.client.get(f"{CHATS}/{conversation}")).json()

    async def ask(self, conversation: str | None, text: str | None, answer: str = "", **fields) -> dict:
        """Send one message and return the whole answer."""
        if answer:
            self.say(answer)
        messages = [] if text is None else [{"role": "user", "content": text}]
        body = {"model": "tiny", "messages": messages, "conversation_id": conversation, **fields}
        answered = await self.client.post(CHAT, json=body, timeout=GENEROUS)
        assert answered.status_code == 200, answered.text
        return {**answered.json(), "headers": answered.headers}

    def stream(self, conversation: str | None, text: str, **headers):
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "conversation_id": conversation}
        return self.client.stream("POST", CHAT, json={**body, "stream": True}, headers=headers, timeout=GENEROUS)


@pytest.fixture
async def chats(card, tokenizer, tmp_path):
    async with running(card, tokenizer, store=f"sqlite:///{tmp_path}/store.db", open=True) as stack:
        yield Chats(stack)


def said(conversation: dict) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in conversation["messages"]]


async def events_of(response) -> list[tuple[str, dict]]:
    """(id, data) of the events of a stream."""
    events, event_id = [], ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: {"):
            events.append((event_id, json.loads(line[6:])))
    return events


def text_in(events) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for _, one in events if one["choices"])


async def test_a_conversation_keeps_its_turns_and_sends_them_as_context(chats):
    talk = await chats.new(system_prompt="Be brief.")
    first = await chats.ask(talk, "What is the capital\nof France?", "Paris.")
    assert first["choices"][0]["message"]["content"] == "Paris."
    assert (first["saved"], first["status"], first["cost_usd"]) == (True, "completed", None)
    await chats.ask(talk, "And of Spain?", "Madrid.")
    turns = "<user>What is the capital\nof France?\n<assistant>Paris.\n<user>And of Spain?\n<assistant>"
    assert chats.prompt == f"<system>Be brief.\n{turns}"
    whole = await chats.get(talk)
    assert (whole["title"], whole["model"]) == ("What is the capital of France?", "tiny")
    assert [role for role, _ in said(whole)] == ["user", "assistant", "user", "assistant"]
    answer = whole["messages"][1]
    assert answer["usage"] == {key: first["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert (answer["status"], answer["finish_reason"], answer["model"]) == ("completed", "stop", "tiny")


async def test_conversations_are_rendered_in_the_turns_of_replays(chats):
    """Before the fix, reads of 4,000 messages each had a part of every turn of the event loop."""
    talk = await chats.new(items=[{"role": "user", "content": "Hello?"}])
    async with event_replay._turns.slot("other"):
        asked = asyncio.create_task(chats.get(talk))
        await eventually(lambda: event_replay._turns._waiting.size)
        assert not asked.done()
    assert said(await asked) == [("user", "Hello?")]


async def test_a_reader_that_leaves_shortens_no_pause_between_pieces():
    def render() -> None:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass

    start = time.monotonic()
    leaving = asyncio.create_task(event_replay.render_in_turn("one", render))
    await asyncio.sleep(0)
    leaving.cancel()
    await event_replay.render_in_turn("other", lambda: None)
    assert time.monotonic() - start >= 0.03 * (1 + event_replay.REPLAY_PAUSE)


async def test_a_retry_and_an_edit_are_branches_and_nothing_is_lost(chats):
    talk = await chats.new()
    await chats.ask(talk, "Hello?", "One.")
    question, one = (await chats.get(talk))["messages"]
    await chats.ask(talk, None, "Two.", after=question["id"])
    retried = await chats.get(talk)
    assert said(retried) == [("user", "Hello?"), ("assistant", "Two.")]
    assert retried["messages"][1]["siblings"] == [one["id"], retried["messages"][1]["id"]]
    await chats.ask(talk, "Bye?", "Three.", after="")
    assert said(await chats.get(talk)) == [("user", "Bye?"), ("assistant", "Three.")]
    back = (await chats.client.post(f"{CHATS}/{talk}/branch", json={"message_id": question["id"]})).json()
    # a branch is shown as it was continued last
    assert said(back) == [("user", "Hello?"), ("assistant", "Two.")]
    await chats.ask(talk, "Hm.", "Four.")
    assert chats.prompt == "<user>Hello?\n<assistant>Two.\n<user>Hm.\n<assistant>"
    assert [one["content"] for one in json.loads((await chats.client.get(f"{CHATS}/export")).text)["messages"]] == [
        "Hello?", "One.", "Two.", "Bye?", "Three.", "Hm.", "Four.",
    ]  # fmt: skip


async def test_a_model_writes_the_title_unless_somebody_has(card, tokenizer, tmp_path):
    settings = {"store": f"sqlite:///{tmp_path}/store.db", "open": True, "conversations": {"title_model": "tiny"}}
    async with running(card, tokenizer, **settings) as stack:
        chats = Chats(stack)

        def script(tensors):
            answer = '"Capital of\nFrance"' if "Write a title" in tokenizer.decode(tensors["input_ids"]) else "Paris."
            return [Step((*tokenizer.encode(answer), 0)), Step(final=True)]

        chats.triton.script = script
        untitled, named = await chats.new(), await chats.new(title="Mine")
        for talk in (untitled, named):
            await chats.ask(talk, "What is it?")
            await chats.ask(talk, "Sure?")

        while (await chats.get(untitled))["title"] != "Capital of France":
            await asyncio.sleep(0.01)
        assert ((await chats.get(named))["title"], len(chats.triton.requests)) == ("Mine", 5)


async def test_two_tabs_keep_both_turns_in_order(chats):
    talk = await chats.new()
    chats.say("Slow answer here.", wait=0.02)
    async with chats.stream(talk, "First?") as one:
        lines = one.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            pass
        # the second tab asks while the first one's answer is written
        await chats.ask(talk, "Second?", "Quick.")
        assert "First" not in chats.prompt
        async for _ in lines:
            pass
    assert said(await chats.get(talk)) == [
        ("user", "First?"), ("assistant", "Slow answer here."), ("user", "Second?"), ("assistant", "Quick."),
    ]  # fmt: skip


async def test_a_long_history_is_cut_to_the_context(chats):
    talk = await chats.new(system_prompt="Stay.")
    await chats.ask(talk, "x" * 90, "a" * 20)
    await chats.ask(talk, "y" * 90, "b" * 20)
    # the context has 256 tokens, and the answer is to have 100 of them
    cut = await chats.ask(talk, "And now?", "c", max_tokens=100)
    assert (cut["dropped_messages"], cut["headers"]["x-llmops-dropped-messages"]) == (4, "4")
    assert chats.prompt == "<system>Stay.\n<user>And now?\n<assistant>"
    assert len((await chats.get(talk))["messages"]) == 6


async def test_a_stream_resumes_after_any_event(chats):
    talk = await chats.new()
    chats.say("The capital of France is Paris. 你好 🙂")
    async with chats.stream(talk, "Hi") as response:
        whole = await events_of(response)
    run = whole[0][1]["id"]
    assert (whole[0][1]["conversation"]["id"], text_in(whole)) == (talk, "The capital of France is Paris. 你好 🙂")
    assert whole[-1][1]["choices"][0]["finish_reason"] == "stop"
    for at, (event_id, _) in enumerate(whole):
        async with chats.client.stream("GET", f"{CHAT}/{run}", headers={"last-event-id": event_id}) as response:
            assert await events_of(response) == whole[at + 1 :]


async def test_an_answer_goes_on_without_its_reader_and_nothing_is_lost_or_doubled(chats):
    talk = await chats.new()
    chats.say("Hello world! How are you? The capital of France is Paris.", wait=0.02)
    async with chats.stream(talk, "Hi") as response:
        lines, seen = response.aiter_lines(), []
        while len(seen) < 5:
            line = await anext(lines)
            if line.startswith("id: "):
                seen.append(line[4:])
    # the page is loaded again: the conversation says that its answer is being written
    message = (await chats.get(talk))["messages"][-1]
    assert message["status"] == "in_progress"
    async with chats.client.stream("GET", f"{CHAT}/{message['run_id']}") as again:
        assert text_in(await events_of(again)) == "Hello world! How are you? The capital of France is Paris."
    assert said(await chats.get(talk))[-1][1] == "Hello world! How are you? The capital of France is Paris."


async def test_an_answer_without_a_reader_is_stopped_and_kept_as_partial(chats, monkeypatch):
    monkeypatch.setattr("llmops.gateway.conversations.chat_run.UNREAD_TIMEOUT", 0.05)
    talk = await chats.new()
    chats.say("Hello world!", Step(hang=True))
    async with chats.stream(talk, "Hi") as response:
        await anext(response.aiter_lines())
    await eventually(lambda: chats.triton.active == 0)
    while (stored := (await chats.get(talk))["messages"][-1])["status"] == "in_progress":
        await asyncio.sleep(0.01)
    assert (stored["status"], stored["finish_reason"]) == ("incomplete", "cancelled")
    partial = stored["content"]
    assert "Hello world!".startswith(partial)
    # it can be continued, and stays one message
    await chats.ask(talk, None, " Go on.", continue_final_message=True)
    assert said(await chats.get(talk)) == [("user", "Hi"), ("assistant", partial + " Go on.")]


async def test_what_would_pass_the_limit_of_an_owner_is_refused_before_an_answer(card, tokenizer, tmp_path):
    """Before the fix, only new conversations were refused, and those that were there grew by any request."""
    settings = {"store": f"sqlite:///{tmp_path}/store.db", "conversations": {"bytes": 530}, "open": True}
    async with running(card, tokenizer, **settings) as stack:
        chats = Chats(stack)
        talk, empty = await chats.new(), await chats.new()
        first = await chats.ask(talk, "Hi", "An answer of any length.")
        again = {"model": "tiny", "messages": [], "conversation_id": talk}
        question = (await chats.get(talk))["messages"][0]["id"]
        item = {"type": "message", "role": "user", "content": "Hi"}
        response = {"model": "tiny", "input": "Hi", "conversation": empty}
        refused = [
            await chats.client.post(CHAT, json={**BODY, "conversation_id": empty}),
            await chats.client.post(CHAT, json={**again, "after": question}),
            await chats.client.post(CHAT, json={**again, "continue_final_message": True}),
            await chats.client.post("/v1/responses", json=response),
            await chats.client.post("/v1/responses", json={**response, "background": True}),
            await chats.client.post(f"/v1/conversations/{empty}/items", json={"items": [item]}),
            await chats.client.patch(f"{CHATS}/{empty}", json={"system_prompt": "Be brief."}),
            await chats.client.post(CHATS, json={}),
        ]
        found = [(one.status_code, one.json()["error"]["code"]) for one in refused]
        assert found == [(429, "conversations_full")] * len(refused)
        assert [len((await chats.get(one))["messages"]) for one in (talk, empty)] == [2, 0]
        assert first["saved"]
        assert (await chats.client.patch(f"{CHATS}/{talk}", json={"title": "It"})).status_code == 200


async def test_another_owners_conversation_is_not_there(chats):
    talk = await chats.new(title="Mine")
    other = {"authorization": "Bearer somebody-else"}
    assert (await chats.client.get(CHATS, headers=other)).json()["data"] == []
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/branch")):
        body = {"message_id": "m"} if path == "/branch" else {"title": "Theirs"}
        answer = await chats.client.request(method, f"{CHATS}/{talk}{path}", json=body, headers=other)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "conversation_not_found"), path
    assert (await chats.client.post(CHAT, json={**BODY, "conversation_id": talk}, headers=other)).status_code == 404
    assert (await chats.get(talk))["title"] == "Mine"


async def test_an_unknown_field_is_refused_and_openais_api_takes_it(chats):
    talk = await chats.new(title="Mine")
    new = {"title": "Yours", "pinned": True}
    for method, path in (("POST", CHATS), ("PATCH", f"{CHATS}/{talk}"), ("POST", f"{CHATS}/{talk}/branch")):
        body = {"message_id": "", "pinned": True} if path.endswith("branch") else new
        refused = await chats.client.request(method, path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pinned"), refused.text
    assert (await chats.get(talk))["title"] == "Mine"
    assert (await chats.client.post("/v1/conversations", json=new)).status_code == 200


async def test_list_search_rename_delete_and_purge(chats):
    france, spain = await chats.new(title="About France"), await chats.new()
    await chats.ask(spain, "50% of Madrid_", "Olé")
    assert [one["id"] for one in (await chats.client.get(CHATS)).json()["data"]] == [spain, france]
    searches = {"france": [france], "50% of": [spain], "50_ of": [], "olé": [spain], "": [spain, france]}
    for text, found in searches.items():
        answer = (await chats.client.get(CHATS, params={"q": text})).json()
        assert [one["id"] for one in answer["data"]] == found, text
    assert (await chats.client.get(CHATS, params={"limit": 1})).json()["has_more"]
    rest = (await chats.client.get(CHATS, params={"limit": 1, "after": spain})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([france], False)
    assert (await chats.client.patch(f"{CHATS}/{spain}", json={"title": "Spain"})).json()["title"] == "Spain"
    assert (await chats.client.delete(f"{CHATS}/{spain}")).json()["deleted"]
    assert (await chats.client.get(f"{CHATS}/{spain}")).status_code == 404
    assert len((await chats.client.get(f"{CHATS}/export")).text.splitlines()) == 1
    assert (await chats.client.delete(CHATS)).json()["deleted"] == 2
    assert (await chats.client.get(CHATS)).json()["data"] == []


async def test_a_store_that_goes_away_does_not_break_the_answer(chats, monkeypatch):
    talk = await chats.new()
    chats.say("Hello world! How are you?", wait=0.1)
    async with chats.stream(talk, "Hi") as response:
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith("data: "):
            pass

        async def away(*_):
            raise OperationalError("", {}, Exception())

        monkeypatch.setattr("llmops.gateway.conversations.conversation_store.table.update_message", away)
        events = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    assert events[-1]["saved"] is False
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_an_export_that_cannot_begin_has_a_status(card, tokenizer, tmp_path, monkeypatch):
    """Before the fix, it broke off after a 200."""
    settings = {"store": f"sqlite:///{tmp_path}/store.db", "open": True, "limits": {"held_bytes": 20_000}}
    async with running(card, tokenizer, **settings) as stack:
        assert (await stack.client.get(f"{CHATS}/export")).content == b""
        await Chats(stack).new(title="x" * 400)
        url = stack.client.base_url
        _, body = await asyncio.open_connection(url.host, url.port)
        body.write(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000\r\n\r\n%b" % (CHAT.encode(), b" " * 19_500)
        )
        refused = []

        async def is_refused() -> bool:
            refused.append(await stack.client.get(f"{CHATS}/export"))
            return refused[-1].status_code == 503

        await eventually(is_refused)
        assert refused[-1].json()["error"]["code"] == "overloaded"
        body.close()

        async def away(*_, **__):
            raise OperationalError("", {}, Exception())

        monkeypatch.setattr("llmops.gateway.conversations.conversation_store.table.conversation_ids", away)
        away_answer = await stack.client.get(f"{CHATS}/export")
        assert (away_answer.status_code, away_answer.json()["error"]["code"]) == (503, "conversations_unavailable")


async def test_an_export_that_breaks_off_says_so_in_its_last_line(chats, monkeypatch):
    """Before the fix, only the missing end of the body told it from a whole export, which not all clients look at."""
    for _ in range(2):
        await chats.new(title="x")
    find, found = store.find_conversation, []

    async def away(*which):
        if found:
            raise OperationalError("", {}, Exception())
        found.append(await find(*which))
        return found[0]

    monkeypatch.setattr(store, "find_conversation", away)
    url = chats.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET {CHATS}/export HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert not answer.endswith(b"\r\n0\r\n\r\n")
    whole, last = (json.loads(line) for line in answer.splitlines() if line.startswith(b"{"))
    assert (whole["title"], last["error"]["code"]) == ("x", "conversations_unavailable")


async def test_a_list_has_neither_system_prompts_nor_metadata(chats):
    """Before the fix, a page of 1,000 with metadata had 38 MB, and encoding it held the event loop for 400 ms."""
    metadata = {f"{number}": "\N{GRINNING FACE}" * 512 for number in range(16)}
    for _ in range(4):
        await chats.new(system_prompt="x" * 20_000, metadata=metadata)
    page = await chats.client.get(CHATS)
    assert len(page.json()["data"]) == 4
    assert len(page.content) < 2000


async def test_an_export_is_sent_in_small_parts(chats):
    """Before the fix, each was a whole conversation, which was kept when the read of the next one was cancelled."""
    for _ in range(2):
        await chats.new(system_prompt="x" * 200_000)
    url = chats.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(f"GET {CHATS}/export HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    sizes = []
    while size := int(await reader.readline(), 16):
        sizes.append(size)
        await reader.readexactly(size + 2)
    writer.close()
    assert sum(sizes) > 400_000
    assert max(sizes) <= EXPORT_PIECE


async def test_openais_client_uses_conversations_unmodified(chats):
    async with openai.AsyncOpenAI(base_url=f"{chats.client.base_url}/v1", api_key="sk-mine", max_retries=0) as client:
        user = {"type": "message", "role": "user", "content": "My name is Ann."}
        made = await client.conversations.create(items=[user], metadata={"topic": "names"})
        changed = await client.conversations.update(made.id, metadata={"topic": "people"})
        topics = [one.metadata["topic"] for one in (made, changed)]
        assert (made.object, topics) == ("conversation", ["names", "people"])
        chats.say("You are Ann.")
        response = await client.responses.create(model="tiny", input="Who am I?", conversation=made.id)
        assert chats.prompt == "<user>My name is Ann.\n<user>Who am I?\n<assistant>"
        assert response.conversation.id == made.id
        asked = {"model": "tiny", "input": "Sure?", "conversation": {"id": made.id}}
        counted = await client.responses.input_tokens.count(**asked)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == (await client.responses.create(**asked)).usage.input_tokens
        assert chats.prompt.endswith("<user>Who am I?\n<assistant>You are Ann.\n<user>Sure?\n<assistant>")
        listed = [item async for item in client.conversations.items.list(made.id, order="asc", limit=2)]
        assert [(one.role, one.content[0].text) for one in listed] == [
            ("user", "My name is Ann."), ("user", "Who am I?"), ("assistant", "You are Ann."),
            ("user", "Sure?"), ("assistant", "You are Ann."),
        ]  # fmt: skip
        assert listed[2].id == response.output[0].id
        (added,) = (await client.conversations.items.create(made.id, items=[{**user, "content": "Bye."}])).data
        one = await client.conversations.items.retrieve(added.id, conversation_id=made.id)
        assert (added.content[0].text, one.content[0].text) == ("Bye.", "Bye.")
        await client.conversations.items.delete(one.id, conversation_id=made.id)
        assert (await client.conversations.items.list(made.id)).first_id == listed[-1].id
        # an export has the responses too
        lines = (await chats.client.get(f"{CHATS}/export", headers={"authorization": "Bearer sk-mine"})).text
        objects = [json.loads(line) for line in lines.splitlines()]
        assert [one["object"] for one in objects] == ["conversation", "response", "response"]
        assert objects[1]["output"][0]["content"][0]["text"] == "You are Ann."
        # the chat page sees the same rows
        shown = await chats.client.get(f"{CHATS}/{made.id}", headers={"authorization": "Bearer sk-mine"})
        assert said(shown.json())[0] == ("user", "My name is Ann.")
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def test_a_tenant_whose_requests_are_not_stored(card, tokenizer, chats, tmp_path):
    own = {"store": f"sqlite:///{tmp_path}/store.db", "conversations": {"tenants": {"": {"store": False}}}}
    async with serving(GatewaySettings(triton=f"127.0.0.1:{chats.triton.port}", open=True, **own)) as (client, _):
        refused = await client.post(CHATS, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "conversations_not_stored")
        chats.say("Hi.")
        response = (await client.post(RESPONSES, json=BODIES[RESPONSES])).json()
        assert response["store"] is False
        assert (await client.get(f"{RESPONSES}/{response['id']}")).status_code == 404
