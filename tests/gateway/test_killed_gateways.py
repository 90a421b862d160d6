"""`kill -9` of gateways under streams: each goes on at another gateway, and is billed once."""

from __future__ import annotations

import httpx
import pytest

from tests.faults.gateway_kills import kill_rounds, mock_rounds
from tests.support.resuming_reader import CHAT, ResumingReader
from tests.support.servers import Valkey


async def test_every_stream_of_a_killed_gateway_goes_on(tmp_path):
    times = await mock_rounds(tmp_path, rounds=5)
    assert len(times) > 5 * 32 / 2  # the others had ended before the kill


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
async def test_with_a_real_model(triton, tmp_path):
    """The texts are those of undisturbed answers: SmolLM2 in float32, greedily."""
    words = ("fox", "lamp", "river", "clock")

    def ask(number: int) -> ResumingReader:
        question = f"Tell a story of a {words[number]}."
        return ResumingReader(question, CHAT, model="smollm2", temperature=0, max_tokens=40)

    async def expected(reader: ResumingReader, client: httpx.AsyncClient) -> str:
        return await ResumingReader("", CHAT, **reader.body).whole(client)

    with Valkey() as valkey:
        times = await kill_rounds(tmp_path, triton.grpc_address, valkey.url, 1, ask, expected, streams=4)
    assert times
