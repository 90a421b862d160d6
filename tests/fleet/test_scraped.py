"""NVIDIA's C++ backend, which says its state on the metrics port only."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

from llmops.gateway.fleet.replicas import scraped
from llmops.gateway.fleet.replicas.replica import Replica
from llmops.gateway.fleet.replicas.scraped import Scraper, gauges
from llmops.gateway.fleet.routing.choose import Cheapest

# as the backend writes it (TensorRT-LLM's inflight_batcher_llm, custom_metrics_reporter)
TEXT = """\
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="llama-tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="llama-tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="llama-tensorrt_llm",request_type="scheduled",version="1"} 7
nv_trt_llm_request_metrics{model="llama-tensorrt_llm",request_type="max",version="1"} 64
nv_trt_llm_request_metrics{model="llama-tensorrt_llm",request_type="active",version="1"} 10
# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="llama-tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="llama-tensorrt_llm",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="llama-tensorrt_llm",version="1"} 300
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="llama-tensorrt_llm",version="1"} 400
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def replica(server: str, clock: Clock) -> Replica:
    card = SimpleNamespace(max_batch_size=64, adapters=(), state=False)
    model = SimpleNamespace(name="llama", card=card, engine=object())
    return Replica(f"{server}:8001", model, Cheapest(), lambda: None, clock=clock)


@contextlib.asynccontextmanager
async def serving(answers: list[str]):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        text = answers.pop(0) if len(answers) > 1 else answers[0]
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def test_gauges_are_those_of_each_model() -> None:
    found = gauges(TEXT)["llama-tensorrt_llm"]
    assert found["nv_trt_llm_request_metrics"]["active"] == 10
    assert found["nv_trt_llm_kv_cache_block_metrics"]["max"] == 400


async def test_what_the_metrics_say_is_believed_and_stays_while_they_cannot_be_read(caplog) -> None:
    one = replica("127.0.0.1", Clock())
    one.enter(500, is_counted=False).mark = one._clock()
    async with serving(
        [TEXT, "no metrics {", TEXT.replace('"active",version="1"} 10', '"active",version="1"} 3')]
    ) as port:
        scraper = Scraper(port)
        await scraper.look([one])
        view = one.view
        assert (view.running, view.waiting) == (7, 3)
        assert (view.free_blocks, view.blocks, view.tokens_per_block) == (300, 400, 64)
        assert view.unseen == 1, "sent after what was counted, maybe"
        await scraper.look([one])
        assert (view.running, view.waiting) == (7, 3)
        await scraper.look([one])
        assert (view.running, view.waiting) == (0, 3)
        await scraper.close()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"http://127.0.0.1:{port}/metrics cannot be read"
    ]


def test_without_any_word_own_requests_are_what_counts() -> None:
    clock = Clock()
    one = replica("10.0.0.1", clock)
    for _ in range(3):
        one.enter(100, is_counted=False)
    one.settle()
    assert (one.view.running, one.view.unseen) == (0, 3)
    clock.now += 10
    one.settle()
    assert (one.view.running, one.view.unseen, one.view.unseen_tokens) == (3, 0, 0)


async def test_metrics_that_cannot_be_read_for_long_leave_own_requests(monkeypatch) -> None:
    monkeypatch.setattr(scraped, "MOST_BYTES", 2 * len(TEXT))
    clock = Clock()
    one = replica("127.0.0.1", clock)
    async with serving([TEXT, 3 * TEXT]) as port:
        scraper = Scraper(port)
        await scraper.look([one])
        one.enter(500, is_counted=False)
        await scraper.look([one])
        assert (one.view.running, one.view.unseen, one.view.unseen_tokens) == (7, 1, 500)
        clock.now += 3
        await scraper.look([one])
        assert (one.view.running, one.view.unseen, one.view.unseen_tokens) == (1, 0, 0)
        await scraper.close()
