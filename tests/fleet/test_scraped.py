"""NVIDIA's C++ backend, which says its state on the metrics port only."""

from types import SimpleNamespace

from llmops.gateway.routing.placement.least_cost import LeastCostPolicy
from llmops.gateway.routing.replicas import gauge_scraper
from llmops.gateway.routing.replicas.gauge_scraper import GaugeScraper
from llmops.gateway.routing.replicas.replica import Replica
from tests.support.pages import Page, PageServer
from tests.support.waiting import Clock

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
# HELP nv_trt_llm_general_metrics General TRT LLM metrics
# TYPE nv_trt_llm_general_metrics gauge
nv_trt_llm_general_metrics{general_type="iteration_counter",model="llama-tensorrt_llm",version="1"} 100
"""


def replica(server: str, clock: Clock) -> Replica:
    card = SimpleNamespace(max_batch_size=64, adapters=(), state=False)
    model = SimpleNamespace(name="llama", card=card, engine=object())
    return Replica(f"{server}:8001", model, LeastCostPolicy(), lambda: None, clock=clock)


async def test_gauges_add_others_requests_and_stay_for_two_seconds_while_they_cannot_be_read(monkeypatch, caplog):
    monkeypatch.setattr(gauge_scraper, "MAX_PAGE_BYTES", 2 * len(TEXT))
    clock = Clock(100.0)
    one = replica("127.0.0.1", clock)
    for _ in range(2):
        one.reserve(500, is_counted=False, prompt=500)
    view = one.view
    answers = [TEXT, "no metrics {", 3 * TEXT]
    with PageServer(lambda _: Page(answers.pop(0))) as server:
        scraper = GaugeScraper(server.server_port)
        await scraper.scrape([one])
        # half of the 8 that are not own ones, as one look may be old, and of the 2 without a first token
        assert (view.source, view.in_flight, view.in_flight_tokens) == ("measured", 2, 1000)
        assert (view.running, view.waiting) == (3, 1)
        assert (view.free_blocks, view.blocks, view.tokens_per_block) == (300, 400, 64)
        await scraper.scrape([one])
        assert (view.running, view.waiting) == (3, 1)
        clock.now += 3
        await scraper.scrape([one])
        assert (view.running, view.waiting, view.in_flight) == (0, 0, 2)
        await scraper.close()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [f"{server.url}/metrics cannot be read"]
