"""The health of a replica, from its reports, its failures and Triton's readiness.

The code is pure: callers pass a monotonic time.
"""

from __future__ import annotations

from llmops.gateway.interfaces import ReplicaState
from llmops.gateway.telemetry.event_loop_lag import PROCESS_STALL_THRESHOLD

#: Seconds without a report after which a replica is suspect. Engines report at least every second.
SUSPECT_TIMEOUT = 5.0
#: Seconds without a report after which a replica is gone if Triton reports that it is not ready.
GONE_TIMEOUT = 2.0
#: Seconds for which a replica that does not report its state is suspect after a failed request.
FAILURE_COOLDOWN = 5.0


class HealthCheck:
    """The health of one replica."""

    def __init__(self, is_reporting: bool, now: float) -> None:
        """Create a check without any report.

        `is_reporting` is True if the engine reports its state.
        """
        self.is_reporting, self.draining = is_reporting, False
        self._last_report: float | None = None
        self._disconnected = self._failed = False
        self._is_loaded = False
        self._failed_until = self._updated = now

    def record_report(self, now: float, draining: bool) -> None:
        """Record a report of the engine's state, in which the engine is `draining` or not."""
        self._last_report, self._disconnected, self.draining = now, False, draining

    def record_disconnect(self) -> None:
        """Record that the connection to the engine ended."""
        self._disconnected = self._last_report is not None

    def record_failure(self, now: float) -> None:
        """Record that the replica failed to take a request that other replicas may take."""
        self._failed, self._failed_until = True, now + FAILURE_COOLDOWN

    def set_loaded(self, is_loaded: bool) -> None:
        """Record whether Triton reports that the model is ready."""
        self._is_loaded = is_loaded

    def silent_seconds(self, now: float) -> float | None:
        """Return the seconds since the last report, or None before the first report."""
        return None if self._last_report is None else max(now - self._last_report, 0.0)

    def update(self, now: float) -> ReplicaState:
        """Return the current state. Must be called several times a second."""
        stall = now - self._updated
        if stall > PROCESS_STALL_THRESHOLD and self._last_report is not None:
            # this process was stopped, so that reports have arrived and are not read yet
            self._last_report += stall
        self._updated = now
        if self._failed and not now < self._failed_until <= now + FAILURE_COOLDOWN:
            self._failed = False
        return self._reported_state(now) if self.is_reporting else self._derived_state()

    def _reported_state(self, now: float) -> ReplicaState:
        silent = self.silent_seconds(now)
        if silent is None:
            return "starting"
        if not self._is_loaded and (self._disconnected or silent > GONE_TIMEOUT):
            return "gone"
        if self._disconnected or silent > SUSPECT_TIMEOUT:
            return "suspect"
        return "draining" if self.draining else "ready"

    def _derived_state(self) -> ReplicaState:
        """Return the state of a replica that reports no state.

        The state follows from Triton's readiness and recent failures.
        """
        if not self._is_loaded:
            return "gone" if self._last_report is not None else "starting"
        self._last_report = self._updated
        return "suspect" if self._failed else "ready"
