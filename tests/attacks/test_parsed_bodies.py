"""Requests that wait, and are much larger in memory than as text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attacks.harness import MIB, Engine, connect, record, scaled

#: Bytes by which the gateway may grow: `limits.held_bytes`, and what is parsed at the moment.
GROWTH = 300 * MIB

PARTS = [{"type": "text", "text": ""}] * 7000 + [{"type": "text", "text": "hi"}]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_bodies_of_many_small_values(programs, start, tmp_path, card, path):
    """Each body of 180 KB takes 4 to 6 MB once it is parsed, until the engine has answered."""
    slow = Engine(tmp_path / "slow", {**card, "max_seq_len": 100_000}, tokens=1, seconds_per_token=scaled(4.0, 20.0))
    programs.callback(slow.stop)
    gateway = start(slow.address, log_level="error")
    gateway.ready()
    body = json.dumps({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": PARTS}]}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    before = gateway.memory()

    def ask(_: int) -> int:
        with connect(gateway) as made:
            made.sendall(head + body)
            return int(made.recv(12)[9:12])

    count = scaled(90, 300)
    with ThreadPoolExecutor(count) as pool:
        statuses = list(pool.map(ask, range(count)))
    growth = gateway.peak() - before
    record(f"{count} bodies of {len(body) // 1024} KiB: {growth / MIB:.0f} MB more")
    assert set(statuses) <= {200, 503, 529}
    assert 200 in statuses
    assert growth < GROWTH
