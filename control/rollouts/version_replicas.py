"""The replicas of a version, as a roll-out starts and stops them."""

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
        addresses: Their addresses as in the setting `replicas`.
        stable: The addresses of the stable version, if they are known.
        differences: What is different for clients, such as "another tokenizer"; empty if nothing,
            None if the stable version's replicas are not known.
        twin: The baseline twin, or None without one.
        twin_problem: Why a twin that was asked for was not started.
    """

    addresses: Sequence[str]
    stable: Sequence[str] = ()
    differences: str | None = ""
    twin: ModelVersion | None = None
    twin_problem: str = ""


class VersionReplicas(Protocol):
    """An interface to start and stop the replicas of versions.

    All methods are called again after a crash of control, so they must be idempotent.
    """

    async def start(
        self, candidate: ModelVersion, stable: ModelVersion, settings: RolloutSettings, twin: str
    ) -> StartedReplicas:
        """Start the replicas of a candidate beside those of the stable version, and check them.

        With `settings.twin`, start a baseline twin of the name `twin` too, if there is room.

        Raises:
            LlmopsError: They cannot be started, or do not pass the checks.
        """
        ...

    async def restore(self, stable: ModelVersion, candidate: ModelVersion) -> Sequence[str]:
        """Start the stable version's replicas that were stopped to make room for the candidate's.

        Returns:
            The addresses of all replicas of the stable version, nothing if none was missing.

        Raises:
            LlmopsError: They cannot be started.
        """
        ...

    async def stop(self, version: ModelVersion, drain_timeout: float) -> None:
        """Stop the replicas when their answers have ended, after `drain_timeout` seconds at most."""
        ...
