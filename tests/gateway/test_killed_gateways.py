"""`kill -9` of gateways under streams: each goes on at another gateway, and is billed once."""

import httpx
import pytest

from llmops.gateway.text.tokenizer import TextTokenizer
from tests.faults.gateway_kills import kill_rounds, mock_rounds
from tests.support.browser import ask, browser_page, open_chat, started_browser
from tests.support.forked_gateways import ForkedGateway
from tests.support.gateway_stack import card_of
from tests.support.resuming_reader import CHAT, BackgroundReader, ResumingReader
from tests.support.servers import Valkey
from tests.support.told_answers import ToldAnswers


async def test_every_stream_of_a_killed_gateway_goes_on(tmp_path):
    assert len(await mock_rounds(tmp_path, rounds=1)) > 32 / 2  # the others had ended before the kill


async def test_a_page_reads_on_after_its_gateway_was_killed(tokenizer_dir, tokenizer: TextTokenizer, tmp_path):
    """The next process at the same address continues the answer; the page does nothing but wait."""
    told = ToldAnswers(card_of(tokenizer_dir, tokenizer), tokenizer, tokens=80, wait=0.05)
    async with told.triton:
        with Valkey() as valkey:
            settings = {"triton": told.triton.address, "redis": valkey.url, "resume": {"lease": "1s"}}
            settings |= {"store": f"sqlite:///{tmp_path}/store.db", "open": True}
            first = await ForkedGateway(**settings).ready()
            async with started_browser() as browser, browser_page(browser) as page:
                await open_chat(page, str(first.client.base_url))
                await ask(page, "Where?")
                await page.locator(".turn.assistant[aria-busy] .body", has_text=told.text("Where?")[:8]).wait_for()
                first.kill()
                await first.close()
                next_one = await ForkedGateway(**settings, port=first.port).ready()
                answer = page.locator(".turn.assistant:not([aria-busy]) .body")
                await answer.wait_for()
                assert (await answer.inner_text()).split() == told.text("Where?").split()
            await next_one.close()


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
async def test_with_a_real_model(triton, tmp_path):
    """The texts are those of undisturbed answers: SmolLM2 in float32, greedily; one answers in the background."""

    def asked(number: int) -> ResumingReader:
        question, fields = f"Tell a story of a {('fox', 'lamp')[number]}.", {"model": "smollm2", "temperature": 0}
        if number:
            return BackgroundReader(question, max_output_tokens=40, **fields)
        return ResumingReader(question, CHAT, max_tokens=40, **fields)

    async def expected(reader: ResumingReader, client: httpx.AsyncClient) -> str:
        return await type(reader)("", **reader.body).whole(client)

    with Valkey() as valkey:
        times = await kill_rounds(tmp_path, triton.grpc_address, valkey.url, 1, asked, expected, streams=2)
    assert len(times) == 2
