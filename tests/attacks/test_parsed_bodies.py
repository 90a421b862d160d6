"""Requests that wait, and are much larger in memory than as text."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.attacks.harness import MIB, max_growth, posted, record, scaled, status
from tests.gateway.test_encoder_servers import Vectors
from tests.support.tokenizer_files import write_wordpiece_tokenizer
from tests.support.waiting import GENEROUS

#: Bytes by which the gateway may grow: `limits.held_bytes`, and what is parsed at the moment.
GROWTH = 300 * MIB

PARTS = [{"type": "text", "text": ""}] * 7000 + [{"type": "text", "text": "hi"}]


def ask_at_once(gateway, path: str, bodies: list[dict]) -> list[int]:
    """Send all bodies at once, and return the statuses of their answers."""

    def ask(one: dict) -> int:
        return status(gateway, posted(path, one, b"connection: close\r\n"))

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_bodies_of_many_small_values(start, own_engine, path):
    """Each body of 180 KB takes 4 to 6 MB once it is parsed, until the engine has answered."""
    gateway = start(own_engine(1, scaled(4.0, 20.0)).address, log_level="error")
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": PARTS}]}
    with max_growth(gateway, GROWTH):
        assert {200} <= set(ask_at_once(gateway, path, [body] * scaled(90, 300))) <= {200, 503, 529}


def test_texts_of_many_tokens(start, own_engine):
    """A token takes 500 bytes while its text is tokenized, so that a text of 700 KB takes 350 MB."""
    gateway = start(own_engine(1).address, log_level="error")
    bodies = [{"model": "tiny", "prompt": "a " * tokens} for tokens in (125_000, 350_000)]
    with max_growth(gateway, GROWTH):
        assert set(ask_at_once(gateway, "/tokenize", bodies * scaled(3, 20))) == {200, 400}


class _LargeVectors(Vectors):
    async def ModelInfer(self, request, context):
        rows = np.ones((request.inputs[0].shape[0], self.card["dimensions"]), np.float32) / 3
        return service_pb2.ModelInferResponse(raw_output_contents=[rows.tobytes()])


async def test_a_small_request_for_large_vectors(start, tokenizer, tokenizer_dir):
    """2,048 vectors of 4,096 numbers are 165 MB of JSON, which a gateway kept twice, and then dropped as unread."""
    inputs = scaled(512, 2048)
    shape = {"max_batch_size": 64, "max_seq_len": 64, "dimensions": 4096, "vocab_size": tokenizer.vocab_size}
    card = {"target": "openvino", "tokenizer_dir": str(tokenizer_dir), "name": "vectors", **shape}
    async with _LargeVectors(card, None) as triton:
        gateway = await asyncio.to_thread(start, triton.address)
        with max_growth(gateway, scaled(64, 150) * MIB):
            async with httpx.AsyncClient(timeout=GENEROUS) as client:
                body = {"model": "vectors", "input": ["a"] * inputs}
                answer = await client.post(f"{gateway.url}/v1/embeddings", json=body)
    record(f"{len(answer.content) / MIB:.0f} MiB of vectors")
    assert len(answer.json()["data"]) == inputs


async def test_long_texts_for_an_encoder(start, tmp_path):
    """Embeddings and queries were tokenised whole where the tokenizer has no bound: 2.2 MB took a gigabyte."""
    shape = {"max_batch_size": 4, "max_seq_len": 256, "dimensions": 3, "vocab_size": 7}
    card = {"target": "openvino", "tokenizer_dir": str(write_wordpiece_tokenizer(tmp_path)), "name": "vectors", **shape}
    text = "!" * 2_200_000
    bodies = [("embeddings", {"input": text}), ("embeddings", {"input": [text]})]
    bodies += [("rerank", {"query": text, "documents": ["a"]}), ("rerank", {"query": "a", "documents": [text]})]
    async with Vectors(card, None) as triton:
        gateway = await asyncio.to_thread(start, triton.address)
        with max_growth(gateway, 100 * MIB):
            async with httpx.AsyncClient(timeout=GENEROUS, base_url=f"{gateway.url}/v1") as client:
                asked = [client.post(path, json={"model": "vectors", **body}) for path, body in bodies]
                answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [400, 400, 400, 200]
    assert all("maximum context length is 256 tokens" in answer.text for answer in answers[:3])
