"""The process that `llmops rollout rehearse` tests: `llmops up`, with a planted fault."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from llmops.cli.stack import Stack, make_repository
from llmops.gateway.interfaces import Engine
from llmops.gateway.routing.cost_model import DEFAULT_STEP_SECONDS
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.routing.replicas.replica_pool import ReplicaPool
from llmops.perf.planted_faults import FaultyEngine
from llmops.store.rollouts import INITIAL_VERSION


def main(engine: str, folder: str, store: str, fault: str) -> None:
    """Serve an engine until SIGTERM, and print the URL when the gateway is ready.

    The fault is planted into every version that a roll-out adds.
    """

    def plant(app: FastAPI) -> AbstractAsyncContextManager[None]:
        def wrap(pool: ReplicaPool) -> Engine:
            if not fault or pool.version in ("", INITIAL_VERSION):
                return pool
            return FaultyEngine(pool, fault, partial(pace, pool.name))

        def pace(model: str) -> float:
            stable = [pool for pool in pools.pools_of(model) if pool.version == INITIAL_VERSION]
            steps = [replica.view.step_seconds for pool in stable for replica in pool.replicas.values()]
            return max(steps, default=0.0) or DEFAULT_STEP_SECONDS

        pools: PoolRegistry = app.state.pools
        pools.wrap_engine = wrap
        return nullcontext()

    with Stack("127.0.0.1", 0, None, store, True, plugins=[plant]) as stack:
        repository, models = make_repository(Path(engine), Path(folder), tenants_apart=stack.tenants_apart)
        stack.start_tritons(repository, 1)
        stack.start_versions(models, Path(folder, "versions"))
        stack.run_gateway(list(models), lambda ready: print(f"READY {ready.url} {ready.models[0]}", flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
