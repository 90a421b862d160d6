"""An encoder on several servers is one model: its batches go where least is to be done, and elsewhere where a
server is gone or hangs."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from llmops.gateway.http.middleware import Check
from llmops.gateway.interfaces import Caller, Quota
from llmops.gateway.ratelimit.limits import RateLimits
from llmops.gateway.ratelimit.memory import InMemoryLimiter
from llmops.gateway.ratelimit.rate_limit_check import RateLimitCheck
from llmops.gateway.settings import Quotas, UsageSettings
from llmops.gateway.usage.sink import NoPrices
from llmops.gateway.usage.usage_check import UsageCheck
from tests.gateway.test_endings import ANN, Kept
from tests.support.gateway_stack import become, in_front_of, replica_lines
from tests.support.scripted_triton import ScriptedTriton
from tests.support.waiting import eventually

BATCH = 4


@dataclass
class Vectors(ScriptedTriton):
    """An embedding model alone: a row's vector is its length, its first id and the server's number. `came` has the rows
    of each batch; while it is `held` nothing is answered."""

    number: int = 0
    came: list[int] = field(default_factory=list)
    held: bool = False
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def RepositoryIndex(self, request, context):
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name="vectors-embedding", version="1", state=self.state)
        return answer

    async def ModelInfer(self, request, context):
        rows = np.frombuffer(request.raw_input_contents[0], np.int32).reshape(request.inputs[0].shape)
        lengths = np.frombuffer(request.raw_input_contents[1], np.int32)
        self.came.append(len(rows))
        assert request.model_name == "vectors-embedding"
        if self.held:
            await self.freed.wait()
        vectors = np.stack([lengths, rows[:, 0], np.full(len(rows), self.number)], axis=1).astype(np.float32)
        return service_pb2.ModelInferResponse(raw_output_contents=[vectors.tobytes()])


@pytest.fixture
def card(tokenizer_dir, tokenizer):
    shape = {"max_batch_size": BATCH, "max_seq_len": 64, "dimensions": 3, "vocab_size": tokenizer.vocab_size}
    return {"target": "openvino", "tokenizer_dir": str(tokenizer_dir), "name": "vectors"} | shape


@contextlib.asynccontextmanager
async def gateway(*tritons: Vectors, idle: str = "3600s", **options):
    for number, triton in enumerate(tritons):
        triton.number = number
    async with in_front_of(*tritons, timeouts={"idle": idle}, **options) as (client, _):
        yield client
        for triton in tritons:
            triton.freed.set()


async def embed(client, *texts: str):
    return await client.post("/v1/embeddings", json={"model": "vectors", "input": list(texts)})


def vectors(answer) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


async def test_they_take_turns_and_a_busy_one_is_left_alone(card) -> None:
    first, second = Vectors(card, None), Vectors(card, None)
    async with gateway(first, second) as client:
        answers = [vectors(await embed(client, "Hello"))[0] for _ in range(6)]
        assert sorted(number for _, _, number in answers) == [0, 0, 0, 1, 1, 1]
        assert len({(length, token) for length, token, _ in answers}) == 1
        first.held = True
        waiting = [asyncio.create_task(embed(client, "Hello")) for _ in range(2)]
        await eventually(lambda: len(first.came) + len(second.came) == 8)
        assert [vectors(await embed(client, "Hello"))[0][2] for _ in range(4)] == [1] * 4
        first.freed.set()
        assert {one.status_code for one in await asyncio.gather(*waiting)} == {200}


async def test_a_large_request_is_cut_for_all_of_them_and_keeps_its_order(card) -> None:
    first, second = Vectors({**card, "max_batch_size": 6}, None), Vectors(card, None)
    texts = ["Hello" + " Hello" * (at % 5) for at in range(8 * BATCH)]
    async with gateway(first, second) as client:
        first.held = second.held = True
        asked = asyncio.create_task(embed(client, *texts))
        # two batches each: the one that runs, and the next
        await eventually(lambda: (first.came, second.came) == ([BATCH] * 2, [BATCH] * 2))
        first.freed.set()
        second.freed.set()
        lengths = [length for length, _, _ in vectors(await asked)]
        assert sum(first.came + second.came) == len(texts)
    singly = {at: lengths[at] for at in range(5)}
    assert (lengths, len(set(singly.values()))) == ([singly[at % 5] for at in range(len(texts))], 5)


async def states(client) -> list[str]:
    return [line["state"] for line in await replica_lines(client, "vectors")]


async def held_batch(client, held: Vectors) -> asyncio.Task:
    """A request whose batch `held` has, and keeps."""
    held.held = True
    before, asked = len(held.came), asyncio.create_task(embed(client, "Hello"))
    while len(held.came) == before:
        if asked.done():
            asked = asyncio.create_task(embed(client, "Hello"))
        await asyncio.sleep(0.01)
    return asked


async def test_what_a_hanging_server_keeps_another_gets(card, caplog) -> None:
    hanging, good = Vectors(card, None), Vectors(card, None)
    async with gateway(hanging, good, idle="0.4s") as client:
        assert await states(client) == ["ready", "ready"]
        with caplog.at_level(logging.WARNING):
            assert vectors(await (await held_batch(client, hanging)))[0][2] == 1
        assert f"Replica 127.0.0.1:{hanging.port} failed on a batch of texts: it does not answer" in caplog.text
        assert await states(client) == ["suspect", "ready"]
        for _ in range(6):
            assert vectors(await embed(client, "Hello"))[0][2] == 1


async def test_a_batch_stays_where_it_is_while_no_other_server_answers(card) -> None:
    first, second = Vectors(card, None), Vectors(card, None)
    async with gateway(first, second) as client:
        second.engine_ready = False
        await become(client, "ready", "gone", model="vectors")
        asked = await held_batch(client, first)
        first.engine_ready = False
        await become(client, "gone", "gone", model="vectors")
        first.freed.set()
        assert vectors(await asked)[0][2] == 0
        assert not second.came


async def test_encoders_that_differ_are_not_mixed(card, caplog) -> None:
    first, second = Vectors(card, None), Vectors({**card, "max_seq_len": 32, "dimensions": 5}, None)
    with caplog.at_level(logging.WARNING):
        async with gateway(first, second) as client:
            for _ in range(4):
                assert vectors(await embed(client, "Hello"))[0][2] == 0
            assert await states(client) == ["ready", "gone"]
    assert [record.getMessage() for record in caplog.records if "gets no requests for" in record.getMessage()] == [
        f"Replica 127.0.0.1:{second.port} gets no requests for model vectors: it has another "
        f"max_seq_len, another dimensions, so it is no replica of vectors on 127.0.0.1:{first.port}"
    ]


class ByRoute(Check):
    """A key for each route, with a few tokens a minute."""

    async def before(self, scope, context) -> None:
        context.caller = Caller("acme", ANN, f"key of {context.route}", quotas=(Quota(context.route, tpm=60),))


async def test_what_they_read_is_reserved_and_billed(card, tmp_path) -> None:
    """A request too many never reaches the engine: the tokens of an encoder are known beforehand."""
    ledger, gate = Kept(), RateLimits(InMemoryLimiter(lambda: 0.0), None, lambda: 0.0)
    usage = UsageCheck(tmp_path / "usage", UsageSettings(), ledger, NoPrices())
    await usage.start()
    triton, texts, read = Vectors(card, None), ["Hello world!", "You"], 0
    async with gateway(triton, checks=[ByRoute(), RateLimitCheck(gate, Quotas()), usage]) as client:
        for path, body in (("/v1/embeddings", {"input": texts}), ("/v1/rerank", {"query": "Hi", "documents": texts})):
            triton.came.clear()
            answers = [await client.post(path, json={"model": "vectors", **body}) for _ in range(20)]
            done = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
            assert sum(done) <= 60 < sum(done) + done[0]
            assert ({answer.status_code for answer in answers}, len(triton.came)) == ({200, 429}, len(done))
            read += sum(done)
        await usage.settle(10)
    assert sum(event.input_tokens for event in ledger.events.values()) == read
    assert {(event.output_tokens, event.finish_reason) for event in ledger.events.values()} == {(0, None)}
    await usage.close()
    await gate.close()
