"""Usage at the door: whose use is written down, and the work behind it from the first request to the last."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
from datetime import UTC, datetime
from pathlib import Path

from starlette.types import Scope

from llmops.cache import cache_dir
from llmops.distribution import missing_extra
from llmops.errors import InputError, ResourceError
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome
from llmops.gateway.settings import GatewaySettings, UsageSettings
from llmops.gateway.usage.delivery import UsageDelivery
from llmops.gateway.usage.outbox import UsageOutbox
from llmops.gateway.usage.outbox_folders import FolderLock, claim, lock_abandoned_folders
from llmops.gateway.usage.outbox_writer import OutboxWriter
from llmops.gateway.usage.sink import NoPrices, Prices, UsageSink

log = logging.getLogger(__name__)

# seconds: between two syncs to the disk, between two tries when it failed, between two looks for what others left,
# and for what is to be shipped when the gateway ends
SYNC_INTERVAL, SYNC_RETRY_INTERVAL, ADOPT_INTERVAL, DRAIN_TIMEOUT = 0.1, 1.0, 30.0, 2.0


# what is wrong with the machine, and not with a file
_MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)


class OutboxWorker:
    """One folder being worked in: its journal, the meter that writes it, and what carries it away."""

    def __init__(self, found: FolderLock, settings: UsageSettings, sink: UsageSink, prices: Prices) -> None:
        """Takes up what a process that died has left. Raises whatever its files make of that."""
        self.claim = found
        self.journal = UsageOutbox(found.folder, settings.bytes)
        try:
            self.meter = OutboxWriter(found.folder, self.journal, prices)
        except Exception:
            self.journal.close()
            raise
        self.shipper = UsageDelivery(self.journal, sink)
        self._tasks = [asyncio.create_task(self._sync(), name="usage-sync")]
        self._tasks.append(asyncio.create_task(self.shipper.run(), name="usage-ship"))

    async def settle(self, seconds: float) -> None:
        """The ledger gets what it can get in as long; the rest is for the next process."""
        self.meter.retry()
        try:
            await self.journal.sync()
            self.shipper.synced()
            self.shipper.hurry()
            await asyncio.wait_for(self.shipper.drained.wait(), seconds)
        except (TimeoutError, OSError):
            log.warning("%d events of usage stay in %s until a gateway starts.", self.shipper.behind, self.claim.folder)

    async def close(self) -> None:
        """What the ledger has needs no folder any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.meter.close()
        self.journal.close()
        if self.shipper.behind:
            self.claim.give_back()
        else:
            self.claim.remove()

    async def _sync(self) -> None:
        """All events of a while at once, and those for which there was no room again and again."""
        while True:
            await self.meter.dirty.wait()
            await asyncio.sleep(SYNC_INTERVAL)
            self.meter.dirty.clear()
            self.meter.retry()
            trouble = bool(self.meter.trouble)
            try:
                await self.journal.sync()
            except OSError as error:
                log.error("Usage cannot be written to the disk (%s).", error.strerror or error)
                trouble = True
            self.shipper.synced()
            if trouble:
                self.meter.dirty.set()
                await asyncio.sleep(SYNC_RETRY_INTERVAL)


class UsageCheck(Check):
    """Counts what each request uses, and refuses requests that nobody could be billed for."""

    def __init__(self, root: Path, settings: UsageSettings, sink: UsageSink, prices: Prices) -> None:
        self._root, self._settings, self._sink, self._prices = root, settings, sink, prices
        self.desk: OutboxWorker | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ResourceError when there is no place for a journal."""
        try:
            self.desk = self._taken_up() or self._opened(claim(self._root))
        except OSError as error:
            raise ResourceError(
                f"Usage cannot be written to {self._root} ({error.strerror or error}); make room there, or name "
                "another folder with the setting usage.journal."
            ) from error
        self._watch = asyncio.create_task(self._look_around(), name="usage-watch")

    def _taken_up(self) -> OutboxWorker | None:
        """Return the first folder that a gateway left and that can be read, at work again."""
        for found in lock_abandoned_folders(self._root):
            desk = self._readable(found)
            if desk is not None:
                return desk
        return None

    def _readable(self, found: FolderLock) -> OutboxWorker | None:
        """Work in a folder that a gateway left, or set it aside if it cannot be read.

        Raises OSError for what the machine lacks: space, rights, descriptors.
        """
        try:
            return self._opened(found)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS:
                found.give_back()
                raise
            log.error(
                "The usage in %s cannot be read (%s); it is kept, and not billed until somebody repairs it.",
                found.quarantine(),
                error,
            )
            return None

    def _opened(self, found: FolderLock) -> OutboxWorker:
        return OutboxWorker(found, self._settings, self._sink, self._prices)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.desk is not None:
            await self.desk.settle(DRAIN_TIMEOUT)
            await self.desk.close()
        await self._sink.close()

    def lag(self) -> float:
        """The age in seconds of the oldest event that the ledger does not have."""
        return self.desk.shipper.lag(datetime.now(UTC)) if self.desk is not None else 0.0

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if scope["method"] != "POST" or self.desk is None:
            return
        meter = self.desk.meter
        if meter.trouble and self._settings.when_full == "refuse":
            meter.retry()
            if meter.trouble:
                raise UnavailableError(
                    "What requests use cannot be written down now; try again.",
                    code="usage_unavailable",
                    detail=meter.trouble,
                )
        context.usage_recorder = meter.tally(context)

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        # of what began and no answer told the end
        if context.usage_recorder is not None:
            context.usage_recorder.end(outcome)
            # it knows its context: as a circle, each request would stay until a collector comes by
            context.usage_recorder = None

    async def _look_around(self) -> None:
        while True:
            try:
                await self._adopt()
            except Exception:
                log.exception("What other gateways left cannot be taken up.")
            await asyncio.sleep(ADOPT_INTERVAL)

    async def _adopt(self) -> None:
        """What workers left that died and have no successor goes to the ledger, and then their folders go."""
        for found in lock_abandoned_folders(self._root):
            try:
                desk = self._readable(found)
            except OSError as error:
                log.error("The journal %s cannot be taken up (%s).", found.folder, error.strerror or error)
                continue
            if desk is None:
                continue
            try:
                await desk.journal.sync()
                desk.shipper.synced()
                await desk.shipper.drained.wait()
            finally:
                await desk.close()


def create_usage_check(settings: GatewaySettings, prices: Prices | None = None) -> UsageCheck | None:
    """None where there is no store.

    Raises InputError for Kafka without a store or a signing key, MissingDependencyError where a library is not there.
    """
    if settings.store is None:
        if settings.kafka is not None:
            raise InputError("The setting `kafka` needs `store`: it says which events have arrived.")
        return None
    try:
        sink = _sink(settings, settings.store)
    except ModuleNotFoundError as error:
        what, extra = ("Kafka", "kafka") if error.name == "aiokafka" else ("A store", "store")
        raise missing_extra(f"{what} needs {error.name}, which is not installed", extra) from error
    return UsageCheck(_root(settings, settings.store), settings.usage, sink, prices or NoPrices())


def _sink(settings: GatewaySettings, store: str) -> UsageSink:
    from llmops.gateway.usage.ledger_sink import LedgerSink

    if settings.kafka is None:
        return LedgerSink(store)
    from llmops.gateway.usage.kafka import Kafka

    return Kafka(settings.kafka, LedgerSink(store))


def _root(settings: GatewaySettings, store: str) -> Path:
    """One folder for each store, whatever its password: what is meant for one is never shipped to another."""
    root = settings.usage.journal or cache_dir() / "usage"
    scheme, _, rest = store.partition("://")
    return root / hashlib.sha256(f"{scheme}://{rest.rpartition('@')[2]}".encode()).hexdigest()[:12]
