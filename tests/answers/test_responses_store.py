"""The store of responses is bounded, keeps owners apart, and is the same for all who open its file."""

import threading
from contextlib import contextmanager

import pytest

from llmops.gateway.answers.parsers.pieces import Text
from llmops.gateway.conversations.builder import ResponseBuilder
from llmops.gateway.conversations.run import ResponseRun
from llmops.gateway.conversations.store import ResponseStore, StoredResponse
from llmops.gateway.conversations.table import Bounds, ResponseTable
from llmops.gateway.errors import InvalidRequestError, NotFoundError


def entry(name, owner="me", before=None, text="x", worker=None):
    output = [{"type": "message", "id": f"out_{name}", "role": "assistant", "content": text}]
    response = {"id": name, "output": output, "previous_response_id": before, "status": "completed"}
    return StoredResponse(owner, response, [{"role": "user", "content": name, "id": f"in_{name}"}], [[1]], worker)


@contextmanager
def opened(path=":memory:", **bounds):
    table = ResponseTable(str(path), Bounds(**bounds))
    store = ResponseStore(table)
    store.size = lambda: store._run(lambda: len(table))
    yield store
    store.close()


async def test_what_is_stored_is_rendered_off_the_event_loop_as_it_was(monkeypatch):
    threads, to_row = [], StoredResponse.to_row

    def noted(self):
        threads.append(threading.current_thread())
        return to_row(self)

    monkeypatch.setattr(StoredResponse, "to_row", noted)
    builder = ResponseBuilder({"id": "a", "output": [], "status": "in_progress", "previous_response_id": None})
    run = ResponseRun(None, builder, [{"id": "in_a", "text": 'é"'}], "me", None)  # type: ignore[arg-type]
    builder.add(Text("Hello"))
    with opened() as store:
        now = run.entry("here")
        builder.add(Text(" world"))
        await store.put(now)
        kept = await store.get("a", "me")
        assert kept == now
        assert (kept.cuts, kept.response["output"][0]["content"][0]["text"]) == ([[5]], "Hello")
    assert threads
    assert threading.main_thread() not in threads


async def missing(store, name, owner="me"):
    with pytest.raises(NotFoundError):
        await store.get(name, owner)


async def test_context_is_the_whole_conversation_in_order():
    with opened() as store:
        for one in (entry("a"), entry("b", before="a"), entry("c", before="b")):
            await store.put(one)
        items = await store.context("c", "me")
    assert [item["id"] for item in items] == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]


async def test_a_conversation_in_use_is_kept_as_a_whole():
    with opened(entries=4) as store:
        await store.put(entry("a"))
        await store.put(entry("b", before="a"))
        for name in "wxyz":
            await store.context("b", "me")
            await store.put(entry(name))
        assert await store.get("a", "me")
        await missing(store, "w")
        assert await store.size() == 4


async def test_a_conversation_with_a_hole_is_refused():
    with opened() as store:
        await store.put(entry("b", before="a"))
        with pytest.raises(NotFoundError) as hole:
            await store.context("b", "me")
        assert (hole.value.code, "'a'" in hole.value.message) == ("previous_response_not_found", True)


async def test_a_response_in_progress_is_no_context():
    with opened() as store:
        await store.put(entry("a", worker="there"))
        with pytest.raises(InvalidRequestError) as early:
            await store.context("a", "me")
    assert early.value.param == "previous_response_id"


async def test_size_is_bounded():
    with opened(size=5_000) as store:
        for at in range(100):
            await store.put(entry(f"r{at}", text="y" * 1_000))
        assert 1 <= await store.size() <= 5
        assert await store.get("r99", "me")
        assert await store.find_item("out_r0", "me") is None


async def test_age_is_bounded():
    with opened(seconds=-1) as store:
        await store.put(entry("a"))
        await missing(store, "a")
        assert await store.find_item("out_a", "me") is None
        with pytest.raises(NotFoundError):
            await store.context("a", "me")
        await store.put(entry("b"))
        assert await store.size() == 1


async def test_owners_do_not_see_each_other():
    with opened() as store:
        await store.put(entry("a"))
        await missing(store, "a", "you")
        assert await store.find_item("out_a", "you") is None
        assert not await store.delete("a", "you")
        with pytest.raises(NotFoundError):
            await store.context("a", "you")
        # an item id that another owner chose as well
        await store.put(entry("b", owner="you"))
        taken = entry("c", owner="you")
        taken.items[0]["id"] = "in_a"
        await store.put(taken)
        assert (await store.find_item("in_a", "me"))["content"] == "a"
        assert await store.delete("a", "me")
        assert await store.find_item("out_a", "me") is None


async def test_a_second_state_of_one_response_replaces_the_first():
    with opened() as store:
        await store.put(entry("a", text="y" * 500, worker="there"))
        await store.put(entry("a", text="z"))
        assert await store.size() == 1
        kept = await store.get("a", "me")
    assert (kept.response["output"][0]["content"], kept.worker, kept.cuts) == ("z", None, [[1]])


async def test_several_gateway_workers_share_a_file(tmp_path):
    path = tmp_path / "responses.db"
    with opened(path, entries=50) as one, opened(path, entries=50) as two:
        await one.put(entry("a"))
        assert (await two.get("a", "me")).items == entry("a").items

        def fill(name):
            table = ResponseTable(str(path), Bounds(entries=50))
            for at in range(100):
                table.put(entry(f"{name}{at}").to_row(), [])
            table.close()

        threads = [threading.Thread(target=fill, args=(name,)) for name in "wxyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert await one.size() == await two.size() == 50


async def test_an_answer_survives_a_store_that_does_not(tmp_path, caplog):
    with opened() as store:
        await store._run(lambda: store._table._db.execute("DROP TABLE items"))
        await store.put(entry("a"))
        await missing(store, "a")
    assert "could not be stored" in caplog.text
