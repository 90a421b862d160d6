"""The versions of models, read from the store periodically, and outcomes written to it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmops.background import LogOnce, PeriodicTask
from llmops.clocks import utc_now
from llmops.errors import LlmopsError
from llmops.gateway.replica_address import DnsAddress, ReplicaAddress, parse_replica
from llmops.gateway.routing.discovery import AddressResolver
from llmops.gateway.routing.replicas.pool_registry import VersionSource
from llmops.gateway.routing.versions.version_table import ServedVersion, VersionTable
from llmops.input_files import MALFORMED
from llmops.store.factory import LazyStore, within
from llmops.store.rollouts import RETIRED, add_outcomes, list_all_versions, list_pins
from llmops.untrusted_text import escape_unsafe

log = logging.getLogger(__name__)

#: Seconds between two reads of the weights, and thereby the delay of `llmops rollout rollback`.
REFRESH_INTERVAL = 1.0
#: Seconds without an answer after which the store counts as unreachable. The weights remain
#: unchanged.
STORE_TIMEOUT = 5.0
#: Maximum number of outcomes per version that a gateway writes at once, which bounds the size of a
#: row. At higher rates, it writes a sample.
MAX_OUTCOMES = 200


class VersionDirectory(VersionSource):
    """The current versions of models, which remain unchanged while the store cannot be reached.

    Attributes:
        on_change: Called after the versions have changed.
        resolver: Finds the replicas of the settings and of the versions.
    """

    def __init__(self, url: str, replicas: Sequence[str]) -> None:
        """Create a directory without versions.

        Args:
            url: URL of the store.
            replicas: The addresses of the replicas in the settings.
        """
        self.table = VersionTable()
        self.on_change: Callable[[], object] = lambda: None
        self.resolver = AddressResolver(
            [parse_replica(one) for one in replicas],
            further=lambda: self._addresses(is_retired=False),
            excluded=lambda: {*self._addresses(is_retired=True)} - {*self._addresses(is_retired=False)},
        )
        self._store, self._log_once = LazyStore(url, pool_size=1), LogOnce()
        self._task = PeriodicTask("versions of models", self.refresh, REFRESH_INTERVAL)
        self._outcomes: defaultdict[str, defaultdict[str, list[Mapping[str, Any]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    async def start(self) -> None:
        """Read the versions, and keep reading them until `close`."""
        await self._task.start(STORE_TIMEOUT)

    async def close(self) -> None:
        await self._task.close()
        await self._store.close()

    def version_of(self, model: str, replica: str) -> str | None:
        return self.table.version_of(model, self.resolver.sources.get(replica, replica))

    def names(self, model: str) -> Sequence[str]:
        return self.table.names(model)

    def preferred(self, model: str) -> Sequence[str]:
        return self.table.preferred(model)

    def record(self, model: str, outcome: Mapping[str, Any]) -> None:
        """Record the end of a request for the judge of a roll-out."""
        batch = self._outcomes[model][outcome["version"]]
        if len(batch) < MAX_OUTCOMES:
            batch.append(outcome)

    async def refresh(self) -> None:
        """Write the recorded outcomes and read the versions now."""
        try:
            await within(STORE_TIMEOUT, self._exchange())
        except (LlmopsError, *MALFORMED) as error:
            reason = error.message if isinstance(error, LlmopsError) else type(error).__name__
            if self._log_once.is_new("store", reason):
                log.error("The versions of models cannot be read (%s); the known weights remain in use.", reason)
        else:
            if self._log_once.is_new("store", None):
                log.warning("The versions of models can be read again.")

    async def _exchange(self) -> None:
        for model in [model for model, batches in self._outcomes.items() if any(batches.values())]:
            batches = self._outcomes.pop(model)
            async with self._store.write() as connection:
                await add_outcomes(connection, model, [one for batch in batches.values() for one in batch], utc_now())
        async with self._store.read() as connection:
            (found, damaged), pins = await list_all_versions(connection), await list_pins(connection)
        models: dict[str, list[ServedVersion]] = {}
        for one in found:
            version = ServedVersion(one.name, frozenset(one.replicas), one.weight, one.state == RETIRED)
            models.setdefault(one.model, []).append(version)
        for model in damaged:
            intact = models.get(model, [])
            # A gateway that starts has no known versions. The replicas of its settings serve the
            # model, unless the intact versions have most of the weight.
            known = intact if sum(one.weight for one in intact) > 50 else []
            models[model] = list(self.table.models.get(model) or known)
            if self._log_once.is_new(("damaged", model), "damaged"):
                name = escape_unsafe(str(model))
                log.error("A version of %s is damaged; the known versions of the model remain in use.", name)
        table = VersionTable(models, pins)
        if table != self.table:
            self.table = table
            self.on_change()

    def _addresses(self, is_retired: bool) -> Sequence[ReplicaAddress | DnsAddress]:
        """Return the replicas that versions name. A replica that cannot be parsed is left out."""
        versions = [one for versions in self.table.models.values() for one in versions if one.is_retired == is_retired]
        found = []
        for text in sorted({address for one in versions for address in one.replicas}):
            try:
                found.append(parse_replica(text))
            except ValueError as error:
                if self._log_once.is_new(text, str(error)):
                    log.error("A version in the store has an invalid replica, which gets no requests: %s.", error)
        return found
