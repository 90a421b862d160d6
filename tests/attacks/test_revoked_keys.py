"""Attack: a revoked key goes on using the answers that it began."""

from __future__ import annotations

import json
import time

import pytest

from tests.attacks.harness import Engine, connect, record, scaled
from tests.support import forked_cli
from tests.support.waiting import wait_until

#: Seconds after `llmops key revoke --now` within which the key's running answers end.
BOUND = 30.0


def llmops(*arguments: str) -> str:
    done = forked_cli.run(*arguments)
    done.check_returncode()
    return done.stdout.strip()


@pytest.fixture
def begun(start, programs, tmp_path, card):
    """A store, a gateway, and for each of two keys a stream that runs for minutes."""
    store = f"sqlite:///{tmp_path}/store.db"
    llmops("tenant", "create", "acme", "--store", store)
    keys = [llmops("key", "create", "--tenant", "acme", "--user", f"{n}@acme.example", "--store", store) for n in "ab"]
    engine = Engine(tmp_path / "engine", card, tokens=2000, seconds_per_token=0.5)
    programs.callback(engine.stop)
    # looks three times as often as keys are looked up: by default each 10 s
    fresh = scaled({"lookups": {"fresh": "3s"}}, {})
    gateway = start(engine.address, store=store, usage={"outbox": str(tmp_path / "outbox")}, **fresh)
    streams = []
    for key in keys:
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 200, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        wait_until(lambda: gateway.alive, "a gateway")
        made = programs.enter_context(connect(gateway))
        made.sendall(sent)
        assert made.recv(12) == b"HTTP/1.1 200"
        streams.append(made)
    return store, keys, streams


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


def test_running_answers_of_a_revoked_key_go_on_unless_it_is_revoked_now(begun):
    store, (first, second), (revoked, other) = begun
    llmops("key", "revoke", second, "--store", store)
    began = time.monotonic()
    llmops("key", "revoke", first, "--now", "--store", store)
    assert ended_after(revoked, BOUND) is not None
    record(f"ended {time.monotonic() - began:.1f} s after the command began")
    assert ended_after(other, 1) is None
