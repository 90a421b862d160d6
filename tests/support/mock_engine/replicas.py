"""Several mock engines in one Triton, each of them a replica, and gateways in front."""

import asyncio
import contextlib
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmops.contract import ENGINE_SUFFIX
from tests.support.mock_engine.planned import Paged
from tests.support.mock_engine.repository import NAME, PLAIN, make_mock_engine
from tests.support.stack import Service, process, triton, wait_ready


@dataclass(frozen=True)
class Engines:
    """One Triton, and the engine models in it as `replicas` of a gateway's settings."""

    server: Service
    replicas: list[str]

    def reused(self) -> int:
        """Blocks of prompts that all replicas have found in their caches so far."""
        return sum(self._values("nv_trt_llm_kv_cache_block_metrics", "reused"))

    def most(self, family: str, value: str) -> int:
        """The highest that one of them has now of a metric with this label."""
        return max(self._values(family, value))

    def _values(self, family: str, value: str) -> list[int]:
        with urllib.request.urlopen(self.server.metrics, timeout=10) as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith(f"{family}{{")]
        known = {
            found[1]: int(float(line.rpartition(" ")[2]))
            for line in lines
            if f'="{value}"' in line and (found := re.search(r'[{,]model="([^"]*)"', line))
        }
        return [known.get(one.rpartition("/")[2], 0) for one in self.replicas]


@contextlib.contextmanager
def engines(engine: Path, paged: Paged, count: int, **options: Any) -> Iterator[Engines]:
    """`count` equal ones with the tokenizer of `engine`, ready. `options` as of `make_mock_engine`."""
    names = [f"{NAME}-{at}" for at in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder, "repository")
        make_mock_engine(engine, repository, text=PLAIN, paged=paged, names=names, **options)
        with triton(repository) as server:
            yield Engines(server, [f"{NAME}={server.address}/{name}{ENGINE_SUFFIX}" for name in names])


@contextlib.contextmanager
def front(replicas: Sequence[str], settings: Mapping[str, Any]) -> Iterator[Service]:
    """`llmops gateway` of these replicas on a free port, when all of them are ready. `address` ends in /v1."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "gateway.yaml")
        # JSON is YAML
        config.write_text(json.dumps({"replicas": list(replicas), **settings}))
        command = [str(Path(sys.executable).parent / "llmops"), "gateway", "--config", str(config), "--port", "0"]
        with process(command, r"listens on (http://\S+)") as (pid, url):
            wait_ready(f"{url}/health/ready")
            yield Service(f"{url}/v1", pid)


def keys_of(store: str, tiers: Iterable[str]) -> dict[str, str]:
    """A key of each tier, each of a tenant of its own, in a new store."""
    return asyncio.run(_keys(store, tiers))


async def _keys(url: str, tiers: Iterable[str]) -> dict[str, str]:
    from llmops.store.factory import open_store
    from tests.support.accounts import add_key

    async with await open_store(url, pool_size=1) as store:
        return {tier: (await add_key(store, tier, tier=tier))[0] for tier in tiers}
