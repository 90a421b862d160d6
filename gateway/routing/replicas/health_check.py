"""How a replica is, from what was heard of it and when. Pure: whoever asks brings the time, of a monotonic clock."""

from __future__ import annotations

from llmops.gateway.interfaces import ReplicaState
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD

# An engine that says nothing for so long is suspected (s): it says its state each second.
SUSPECT_TIMEOUT = 5.0
# One of which nothing is heard, and that Triton calls not ready, is gone after so long (s).
GONE_TIMEOUT = 2.0
# One that says nothing of itself is passed over for so long after it failed (s).
FAILURE_COOLDOWN = 5.0


class HealthCheck:
    """`speaks`: the engine says its state of its own accord; else Triton's word counts, and whether requests failed."""

    def __init__(self, speaks: bool, now: float) -> None:
        self.speaks, self.draining = speaks, False
        self._heard: float | None = None
        self._lost = self._failed = False
        self._loaded = False
        self._until = self._looked = now

    def heard(self, now: float, draining: bool) -> None:
        self._heard, self._lost, self.draining = now, False, draining

    def lost(self) -> None:
        """The connection to it ended."""
        self._lost = self._heard is not None

    def failed(self, now: float) -> None:
        """It could not take a request that others may be able to."""
        self._failed, self._until = True, now + FAILURE_COOLDOWN

    def loaded(self, is_ready: bool) -> None:
        """What Triton says of the model."""
        self._loaded = is_ready

    def silent(self, now: float) -> float | None:
        """Seconds since it was heard of; None if it never was."""
        return None if self._heard is None else max(now - self._heard, 0.0)

    def look(self, now: float) -> ReplicaState:
        """To be called several times a second."""
        held_up = now - self._looked
        if held_up > PROCESS_STALL_THRESHOLD and self._heard is not None:
            # what came meanwhile has not been read yet
            self._heard += held_up
        self._looked = now
        if self._failed and not now < self._until <= now + FAILURE_COOLDOWN:
            self._failed = False
        return self._spoken(now) if self.speaks else self._told()

    def _spoken(self, now: float) -> ReplicaState:
        silent = self.silent(now)
        if silent is None:
            return "starting"
        if not self._loaded and (self._lost or silent > GONE_TIMEOUT):
            return "gone"
        if self._lost or silent > SUSPECT_TIMEOUT:
            return "suspect"
        return "draining" if self.draining else "ready"

    def _told(self) -> ReplicaState:
        if not self._loaded:
            return "gone" if self._heard is not None else "starting"
        self._heard = self._looked
        return "suspect" if self._failed else "ready"
