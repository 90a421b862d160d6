"""Files of a gateway that died, damaged in every way: the next gateway starts, and no bill is lost without a word."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.settings import UsageSettings
from llmops.gateway.usage.event_formats import new_event_id
from llmops.gateway.usage.open_answers import SLOT_BYTES, TOKENS, OpenAnswers
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.sink import NoPrices, UsageSink
from llmops.gateway.usage.usage_check import UsageCheck
from tests.attacks.harness import record, scaled
from tests.gateway.test_usage_journal import event

EVENTS, OPEN_ANSWERS = 20, 5


class Ledger(UsageSink):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.events: dict[str, UsageEvent] = {}

    async def write(self, events: Sequence[UsageEvent]) -> None:
        self.events |= {one.id: one for one in events}

    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        return frozenset(ids) & self.events.keys()


def a_dead_gateway(root: Path) -> Path:
    """Leave a folder with events that no ledger has and with answers that were under way."""
    folder = root / "gw-000000000000"
    folder.mkdir(parents=True)
    journal, page = UsageOutbox(folder), OpenAnswers(folder / "page")
    for seq in range(EVENTS):
        journal.append(event(seq))
    for at in range(OPEN_ANSWERS):
        slot = page.take()
        assert slot is not None
        slot.open(new_event_id(), 1_790_000_000_000_000, 10, ["tiny", f"answer-{at}", "acme", "user", "key", "pro"])
        slot.numbers[TOKENS] = 100 + at
    journal.close()
    page.close()
    return folder


async def taken_up(root: Path) -> Ledger:
    """Start a gateway's usage on `root`, and return what its ledger has when all is shipped."""
    ledger = Ledger()
    check = UsageCheck(root, UsageSettings(), ledger, NoPrices())
    await check.start()
    assert check.desk is not None
    await check.desk.settle(30)
    await check.close()
    return ledger


def flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 20)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def torn_slot(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(OPEN_ANSWERS) * SLOT_BYTES
    return data[:at] + chance.randbytes(SLOT_BYTES) + data[at + SLOT_BYTES :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits": flip,
    "half": lambda data, chance: data[: chance.randrange(len(data))],
    "empty": lambda data, chance: b"",
    "random": lambda data, chance: chance.randbytes(len(data)),
    "torn slot": torn_slot,
    "older": lambda data, chance: b"llmops usage 0\n" + data[15:],
}


@pytest.mark.parametrize("file", ["page", "00000000000000000000.journal", "lock"])
@given(damage=st.sampled_from(sorted(DAMAGES)), seed=st.integers(0, 2**32))
@settings(max_examples=scaled(25, 500))
def test_a_damaged_file(file: str, damage: str, seed: int) -> None:
    """What the other file has is billed, and a loss is an error in the log."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "usage"
        path = a_dead_gateway(root) / file
        data = path.read_bytes() if path.exists() else b"x"
        path.write_bytes(DAMAGES[damage](data, random.Random(seed)))
        said: list[str] = []
        listener = logging.Handler(logging.WARNING)
        listener.emit = lambda one: said.append(one.getMessage())  # type: ignore[method-assign]
        logging.getLogger("llmops").addHandler(listener)
        try:
            ledger = asyncio.run(taken_up(root))
        finally:
            logging.getLogger("llmops").removeHandler(listener)
        kept = [one for one in ledger.events.values() if one.finish_reason not in ("damaged", "gateway_lost")]
        lost = [one for one in ledger.events.values() if one.finish_reason == "gateway_lost"]
        if file != "00000000000000000000.journal":
            assert len(kept) == EVENTS
        if file != "page":
            assert {one.output_tokens for one in lost} == set(range(100, 100 + OPEN_ANSWERS))
        elif len(lost) < OPEN_ANSWERS and damage not in ("empty", "half"):
            # a file that ends early has nothing that could be found damaged
            assert any("damaged" in text for text in said), said


async def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    """Folders in the place of files, and a journal that may not be read, are set aside whole."""
    root = tmp_path / "usage"
    folder = a_dead_gateway(root)
    (folder / "page").unlink()
    (folder / "page").mkdir()
    ledger = await taken_up(root)
    assert ledger.events == {}
    (aside,) = root.glob("damaged-*")
    assert (aside / "00000000000000000000.journal").stat().st_size > 0
    record("the gateway starts beside every damaged file; before, a torn slot stopped each start")
