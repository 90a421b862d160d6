"""Attack: a revoked key goes on using the answers that it began."""

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest

from llmops.gateway.auth.authentication import Authentication
from llmops.gateway.conversations import title_writer
from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller
from tests.attacks.harness import connect, posted, record, scaled
from tests.support import forked_cli
from tests.support.servers import Valkey
from tests.support.waiting import GENEROUS, wait_until

#: Seconds after `llmops key revoke --now` within which the key's running answers end.
BOUND = 30.0


def llmops(*arguments: str) -> str:
    done = forked_cli.run(*arguments)
    done.check_returncode()
    return done.stdout.strip()


@pytest.fixture
def begun(start, own_engine, programs, tmp_path):
    """A store, two keys, for each of them a stream that runs for minutes, and their gateway."""
    store = f"sqlite:///{tmp_path}/store.db"
    llmops("tenant", "create", "acme", "--store", store)
    keys = [llmops("key", "create", "--tenant", "acme", "--user", f"{n}@acme.example", "--store", store) for n in "ab"]
    engine = own_engine(2000, 0.5)
    # looks three times as often as keys are looked up: by default each 10 s
    fresh = scaled({"lookups": {"fresh": "3s"}}, {})
    gateway = start(engine.address, store=store, usage={"outbox": str(tmp_path / "outbox")}, **fresh)
    return store, keys, [programs.enter_context(stream(gateway, key)) for key in keys], gateway


def stream(gateway, key: str):
    """A connection with an answer that runs for minutes."""
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 200, "stream": True}
    made = connect(gateway)
    made.sendall(posted("/v1/completions", body, f"authorization: Bearer {key}\r\n".encode()))
    assert made.recv(12) == b"HTTP/1.1 200"
    return made


def ended_after(stream, seconds: float) -> float | None:
    """Seconds after which the stream ended; None if it still runs after `seconds`."""
    began = time.monotonic()
    stream.settimeout(5)
    while (passed := time.monotonic() - began) < seconds:
        try:
            if not stream.recv(65536):
                return passed
        except ConnectionError:
            return passed
    return None


def in_background(gateway, key: str) -> str:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 200, "background": True}
    made = httpx.post(f"{gateway.url}/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})
    return str(made.raise_for_status().json()["id"])


def test_a_revoked_key_reads_no_running_answer_of_its_user(begun):
    """Before the fix, it read on as long as the answer of the user's other key went on."""
    store, (first, _), _, gateway = begun
    second = llmops("key", "create", "--tenant", "acme", "--user", "a@acme.example", "--store", store)
    path = f"/v1/responses/{in_background(gateway, first)}?stream=true"
    with connect(gateway) as reader:
        reader.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {second}\r\n\r\n".encode())
        assert reader.recv(12) == b"HTTP/1.1 200"
        llmops("key", "revoke", second, "--now", "--store", store)
        assert ended_after(reader, BOUND) is not None


def test_an_answer_that_another_gateway_took_over_ends_with_its_key(start, own_engine, programs, tmp_path):
    """Before the fix, it went on to its end, and was billed."""
    store = f"sqlite:///{tmp_path}/store.db"
    llmops("tenant", "create", "acme", "--store", store)
    key = llmops("key", "create", "--tenant", "acme", "--user", "a@acme.example", "--store", store)
    engine = own_engine(2000, 0.5)
    shared = {"redis": programs.enter_context(Valkey()).url, "resume": {"lease": "2s"}, "lookups": {"fresh": "3s"}}
    outbox = {"usage": {"outbox": str(tmp_path / "outbox")}}
    one, other = (start(engine.address, store=store, **shared, **outbox) for _ in range(2))
    headers, run = {"authorization": f"Bearer {key}"}, in_background(one, key)
    wait_until(lambda: "msg_" in httpx.get(f"{one.url}/v1/responses/{run}", headers=headers).text, "tokens")
    one.kill()
    other.found("(continues here after)")
    llmops("key", "revoke", key, "--now", "--store", store)
    began = time.monotonic()
    wait_until(lambda: "because its key was revoked with --now" in other.log, "the end of the answer")
    record(f"ended {time.monotonic() - began:.1f} s after the command")
    assert time.monotonic() - began < BOUND
    second = llmops("key", "create", "--tenant", "acme", "--user", "a@acme.example", "--store", store)

    def stored() -> str:
        again = httpx.get(f"{other.url}/v1/responses/{run}", headers={"authorization": f"Bearer {second}"})
        return str(again.json()["status"])

    wait_until(lambda: stored() == "cancelled", "what there is of it in the store")


async def test_a_title_that_waits_ends_with_its_key(monkeypatch):
    """Before the fix, it was written and billed when its turn came."""
    waiting, ended, caller = asyncio.Event(), asyncio.Event(), Caller("acme", "key-1")

    class Directory:
        async def ended(self, callers):
            return callers

    class Billing(Check):
        def after(self, context, outcome):
            ended.set()

    async def wait_in_queue(*_):
        waiting.set()
        await asyncio.Event().wait()

    class Conversations:
        async def find(self, *_):
            return SimpleNamespace(title="Hi")

    monkeypatch.setattr(title_writer, "answer_message", wait_in_queue)
    authentication = Authentication(Directory(), interval=0.01)
    titles = title_writer.TitleWriter(None, "tiny", [authentication, Billing()])
    titles.schedule(Conversations(), caller, "conv_1", "Hi", "Hello.")
    try:
        await waiting.wait()
        await asyncio.wait_for(ended.wait(), GENEROUS)
    finally:
        await titles.close()
        await authentication._running.close()


def test_running_answers_of_a_revoked_key_go_on_unless_it_is_revoked_now(begun):
    store, (first, second), (revoked, other), _ = begun
    llmops("key", "revoke", second, "--store", store)
    began = time.monotonic()
    llmops("key", "revoke", first, "--now", "--store", store)
    assert ended_after(revoked, BOUND) is not None
    record(f"ended {time.monotonic() - began:.1f} s after the command began")
    assert ended_after(other, 1) is None
    # before the fix, nothing could end the answers of a key that was revoked without --now
    llmops("key", "revoke", second, "--now", "--store", store)
    assert ended_after(other, BOUND) is not None


def test_running_answers_of_a_replaced_secret_end_and_those_of_the_new_one_go_on(begun):
    """Before the fix, they went on to their ends after `--overlap 0`, which is advised after a leak."""
    store, (first, _), (leaked, other), gateway = begun
    new = llmops("key", "rotate", first, "--overlap", "1h", "--store", store)
    with stream(gateway, new) as kept:
        assert ended_after(leaked, 6) is None
        newest = llmops("key", "rotate", new, "--overlap", "0", "--store", store)
        began = time.monotonic()
        assert ended_after(kept, BOUND) is not None
        assert ended_after(leaked, BOUND) is not None
        record(f"ended {time.monotonic() - began:.1f} s after the command")
    with stream(gateway, newest) as kept:
        assert ended_after(kept, 6) is None
    assert ended_after(other, 1) is None
