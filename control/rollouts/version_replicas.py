"""The interface with which a roll-out starts and stops the replicas of a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from llmops.control.rollouts.schemas import RolloutSettings
from llmops.store.rollouts import ModelVersion


@dataclass(frozen=True)
class StartedReplicas:
    """Replicas that have answered a request and passed `llmops verify --quick`.

    Attributes:
        addresses: Addresses of the candidate's replicas, in the form of the setting `replicas`.
        stable: Addresses of the stable version's replicas, empty if they are not known.
        differences: Differences that clients notice, such as "another tokenizer". Empty if there
            are none, None if the stable version's replicas are not known.
        twin: The baseline twin, or None.
        twin_problem: Reason why a requested twin was not started.
    """

    addresses: Sequence[str]
    stable: Sequence[str] = ()
    differences: str | None = ""
    twin: ModelVersion | None = None
    twin_problem: str = ""


class VersionReplicas(Protocol):
    """An interface to start and stop the replicas of versions.

    All methods must be idempotent, because they are called again after a crash of control.
    """

    async def start(
        self, candidate: ModelVersion, stable: ModelVersion, settings: RolloutSettings, twin: str
    ) -> StartedReplicas:
        """Start a candidate's replicas beside the stable version's replicas, and check them.

        With `settings.twin`, also start a baseline twin named `twin` if there is room.

        Raises:
            LlmopsError: The replicas cannot be started, or do not pass the checks.
        """
        ...

    async def restore(self, stable: ModelVersion, candidate: ModelVersion) -> Sequence[str]:
        """Start the stable version's replicas that were stopped to make room for the candidate.

        Returns:
            Addresses of all replicas of the stable version, or no addresses if no replica was
                missing.

        Raises:
            LlmopsError: The replicas cannot be started.
        """
        ...

    async def stop(self, version: ModelVersion, drain_timeout: float) -> None:
        """Stop replicas when their answers have ended, after at most `drain_timeout` seconds."""
        ...
