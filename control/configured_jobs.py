"""The roster: which duties the leader has, as the settings say."""

from __future__ import annotations

from collections.abc import Sequence

from llmops.control.leader_jobs import LeaderJob
from llmops.control.reconcile import Reconciler
from llmops.control.retention import Retention
from llmops.distribution import missing_extra
from llmops.gateway.settings import GatewaySettings


def make_leader_jobs(settings: GatewaySettings) -> Sequence[LeaderJob]:
    """Raises MissingDependencyError for Kafka without its client, InputError for Kafka without a signing key."""
    assert settings.store is not None
    duties: tuple[LeaderJob, ...] = (Reconciler(settings.store, settings.usage.engines),)
    if settings.audit.days is not None:
        duties = (*duties, Retention(settings.store, settings.audit.days))
    if settings.kafka is None:
        return duties
    try:
        from llmops.control.ledger import Ledger
    except ModuleNotFoundError as error:
        raise missing_extra(f"Kafka needs {error.name}, which is not installed", "kafka") from error
    return (*duties, Ledger(settings.kafka, settings.store))
