"""Tokens that wait in a slot's stream for a slow reader."""

import tracemalloc
from unittest.mock import Mock

from llmops.contract import LAST_OF_SLOT
from llmops.gateway.interfaces import TokenBatch
from llmops.gateway.triton.slot_stream import SlotStream


async def test_unread_tokens_of_several_sequences_are_merged():
    """Before the fix, only those of one sequence were: each token of an answer with `n` took 200 bytes, not 40."""
    stream = SlotStream(0, Mock(), 8, lambda slot: None)
    tracemalloc.start()
    try:
        for token in range(1000, 5000):
            for sequence in range(8):
                stream.push(TokenBatch(sequence, [token * 10 + sequence], [-0.5] if sequence else None))
        assert tracemalloc.get_traced_memory()[0] < 8 * 4000 * 60
    finally:
        tracemalloc.stop()
    stream.mark(LAST_OF_SLOT, None)
    read: dict[int, list[int]] = {}
    async for batch in stream:
        read.setdefault(batch.sequence, []).extend(batch.tokens)
        assert len(batch.logprobs or batch.tokens) == len(batch.tokens)
    assert read == {sequence: [token * 10 + sequence for token in range(1000, 5000)] for sequence in range(8)}
