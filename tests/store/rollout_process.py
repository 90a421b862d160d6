"""A process that carries roll-outs out, for a test that kills it."""

import asyncio

from llmops.control.rollouts.runner import RolloutRunner
from llmops.control.rollouts.version_replicas import StartedReplicas
from llmops.store.rollouts import ModelVersion


class Replicas:
    """Replicas that start and stop in a moment."""

    async def start(self, candidate, stable, settings, twin):
        await asyncio.sleep(0.01)
        started = ModelVersion(stable.model, twin, replicas=["twin:8001"]) if settings.twin else None
        return StartedReplicas([f"{candidate.name}:8001"], twin=started)

    async def restore(self, stable, candidate):
        return ()

    async def stop(self, version, drain_timeout):
        await asyncio.sleep(0.01)


def carry_out_forever(url: str) -> None:
    asyncio.run(RolloutRunner(url, Replicas(), tick=0.005, weights_delay=0).run())
