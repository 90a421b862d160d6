"""The check that records the usage of requests, and the tasks that deliver the usage."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Scope

from llmops.background import LogOnce, TaskSet, cancel_tasks, every
from llmops.cache import cache_dir, check_own_folders
from llmops.distribution import missing_extra
from llmops.errors import InputError, LlmopsError, ResourceError
from llmops.gateway.errors import UnavailableError
from llmops.gateway.http.middleware import Check
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Outcome, UsageOwner
from llmops.gateway.settings import GatewaySettings, UsageSettings
from llmops.gateway.usage.delivery import BATCH_DELAY, BATCH_SIZE, UsageDelivery
from llmops.gateway.usage.event_formats import decode_event
from llmops.gateway.usage.outbox import SQLITE_FILES, UsageOutbox, is_machine_error, salvage_events
from llmops.gateway.usage.outbox_folders import (
    FolderLock,
    count_other_folders,
    lock_abandoned_folders,
    lock_new_folder,
    set_aside_special_files,
)
from llmops.gateway.usage.outbox_writer import OutboxWriter, recover_open_answers, shared_answer_ids
from llmops.gateway.usage.sink import NoPrices, Prices, UsageSink

if TYPE_CHECKING:
    from llmops.gateway.usage.billing import Billing

log = logging.getLogger(__name__)

#: Seconds between two transactions of the outbox. Until then an event is in its slot, which
#: survives a killed process.
FLUSH_INTERVAL = 0.1
#: Seconds between two checkpoints, which write the outbox to the disk.
CHECKPOINT_INTERVAL = 1.0
#: Seconds between two searches for outboxes of dead gateways, whose old events need no fast
#: delivery.
ADOPT_INTERVAL = 30.0
#: Seconds after the start of a gateway in which the outboxes of dead gateways are usually delivered;
#: until then, the first request of each budget waits for them.
ADOPT_TIMEOUT = 2.0
#: Seconds that a gateway which shuts down takes to deliver its last events.
DRAIN_TIMEOUT = 2.0
#: Seconds before, for events that only its memory has: Docker kills a container after 10 seconds, and
#: the loss is to be logged by then.
UNSAVED_TIMEOUT = 5.0
#: Events of a damaged outbox that are copied in one transaction, which bounds the memory they take.
_SALVAGE_BATCH = 1000
#: Errors of the machine, after which a file may be intact.
_MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)

FindOwners = Callable[[Sequence[str]], Awaitable[Mapping[str, UsageOwner] | None]]


class OutboxWorker:
    """An outbox and the tasks that deliver it and write it to the disk.

    Attributes:
        lock: The lock on the outbox's folder.
        outbox: The outbox.
        writer: The writer of new events; None for the outbox of a dead gateway.
        delivery: The delivery of the outbox to the ledger.
    """

    def __init__(
        self, lock: FolderLock, outbox: UsageOutbox, sink: UsageSink, writer: OutboxWriter | None = None
    ) -> None:
        self.lock, self.outbox, self.writer, self._sink = lock, outbox, writer, sink
        self.delivery = UsageDelivery(outbox, sink)
        self._tasks, self._log_once = TaskSet(), LogOnce()
        self._tasks.start(self.delivery.run(), "usage-delivery")
        if writer is not None:
            self._tasks.start(self._flush(writer), "usage-flush")
            self._tasks.start(every(BATCH_DELAY, partial(self._send_unsaved, writer)), "usage-unsaved")
            self._tasks.start(every(CHECKPOINT_INTERVAL, self._checkpoint), "usage-checkpoint")

    async def settle(self, seconds: float) -> None:
        """Deliver events for at most `seconds`. The next process delivers the rest.

        Events that only the memory has get up to `UNSAVED_TIMEOUT` seconds before.
        """
        if self.writer is not None:
            self.writer.flush()
            with suppress(TimeoutError):
                async with asyncio.timeout(UNSAVED_TIMEOUT):
                    await self._send_unsaved(self.writer)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.delivery.drain()
        staying = self.delivery.behind
        if self.writer is not None:
            staying += self.writer.pending - self.writer.unsaved
        # `close` reports the loss of a folder that was removed.
        if staying and self.lock.folder.exists():
            log.warning(
                "%d usage events stay in %s; the next gateway that starts delivers them.",
                staying,
                self.lock.folder,
            )

    async def close(self) -> None:
        """End the tasks.

        Delete the folder if the ledger has confirmed all events, and set the folder aside if events
        are damaged.
        """
        await self._tasks.cancel()
        waiting = self.delivery.behind
        if self.writer is not None:
            self.writer.close()
            waiting = self.delivery.behind + self.writer.pending + self.writer.offered
        self.outbox.close()
        if not self.lock.folder.exists():
            log.error(
                "The outbox %s was removed while the gateway used it. %d usage events that the ledger had not "
                "confirmed are lost with it and not billed; leave the folder of `usage.outbox` to the gateway.",
                self.lock.folder,
                waiting,
            )
            self.lock.release()
        elif waiting:
            self.lock.release()
        elif self.outbox.damaged:
            log.error(
                "%d damaged usage events cannot be billed; they are kept in %s.",
                len(self.outbox.damaged),
                self.lock.quarantine(),
            )
        else:
            self.lock.remove()

    async def _flush(self, writer: OutboxWriter) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL)
            writer.flush()

    async def _send_unsaved(self, writer: OutboxWriter) -> None:
        """Send events that only the memory has past the outbox, until none is left."""
        while events := writer.next_unsaved(BATCH_SIZE):
            try:
                await self._sink.write([decode_event(event) for event in events])
            except Exception:  # noqa: BLE001  any error: they are sent again, and `close` counts the rest
                await asyncio.sleep(BATCH_DELAY)
            else:
                writer.drop(events)

    async def _checkpoint(self) -> None:
        try:
            await self.outbox.checkpoint()
        except (sqlite3.Error, OSError) as error:
            if not self._log_once.is_new("disk", "failed"):
                return
            if self.lock.folder.exists():
                log.error(
                    "Usage cannot be written to the disk (%s); the gateway retries. A power failure would lose it.",
                    error,
                )
            else:
                log.error(
                    "The outbox %s was removed while the gateway uses it. Usage is delivered as long as the gateway "
                    "runs; stop the gateway, which delivers the rest, and start it again.",
                    self.lock.folder,
                )
        else:
            self._log_once.is_new("disk", None)


class UsageCheck(Check):
    """A check that records the usage of each request and rejects requests that cannot be recorded."""

    def __init__(self, root: Path, settings: UsageSettings, sink: UsageSink, prices: Prices) -> None:
        self._root, self._settings, self._sink, self._prices = root, settings, sink, prices
        self.worker: OutboxWorker | None = None
        self._adopted: OutboxWorker | None = None
        self._adoption: asyncio.Task[None] | None = None
        # Costs in micro-dollars of the events in the outboxes of dead gateways, until the ledger
        # takes the first of them. The key is a key or tenant id, as in `Quota.of`, and a day.
        self._undelivered: Counter[tuple[str, str]] = Counter()
        self._adopted_events = 0
        # The number of events that each dead gateway wrote, by its id, until the ledger is asked.
        self._written: dict[str, int] = {}
        self._adopted_all = asyncio.Event()
        #: Function that returns the gateways which bill the answers with these ids; None if answers
        #: never outlive their gateway.
        self.find_owners: FindOwners | None = None

    async def start(self) -> None:
        """Open a new outbox under a new gateway id, and start to deliver dead gateways' outboxes.

        Raises:
            ResourceError: The outbox cannot be created.
        """
        try:
            lock = lock_new_folder(self._root)
            outbox = UsageOutbox(lock.folder, self._settings.bytes)
            self.worker = OutboxWorker(lock, outbox, self._sink, OutboxWriter(lock.folder, outbox, self._prices))
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ResourceError(
                f"Usage cannot be written to {self._root} ({reason}); make room there, or name another folder with the "
                "setting usage.outbox."
            ) from error
        if others := count_other_folders(self._root):
            log.warning(
                "%s has %d outboxes of other stores. If one is of this store, which got a new address, stop its "
                "gateway, move its folder gw-… to %s, and start the gateway.",
                *(self._root.parent, others, self._root),
            )
        self._started = asyncio.get_running_loop().time()
        self._adoption = asyncio.create_task(self._adopt(), name="usage-adoption")

    async def settle(self, seconds: float) -> None:
        """Deliver the events of this gateway for at most `seconds`."""
        if self.worker is not None:
            await self.worker.settle(seconds)

    async def close(self) -> None:
        """Deliver the events that can be delivered now, and end all tasks."""
        await cancel_tasks(self._adoption)
        if self.worker is not None:
            await self.worker.settle(DRAIN_TIMEOUT)
            await self.worker.close()
        await self._sink.close()

    def lag(self) -> float:
        """Return the age in seconds of the oldest event that the ledger has not confirmed."""
        now = datetime.now(UTC)
        return max((worker.delivery.lag(now) for worker in (self.worker, self._adopted) if worker), default=0.0)

    async def undelivered(self, owner: str, since: datetime) -> int:
        """Return the cost of events that dead gateways left and the ledger cannot take now.

        The first call waits for at most `ADOPT_TIMEOUT` seconds until the ledger has taken them.

        Args:
            owner: A key id, or `tenant ID` for a tenant.
            since: The start of the period.

        Returns:
            The cost in micro-dollars.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._started + ADOPT_TIMEOUT):
                await self._adopted_all.wait()
        if self._adopted is not None and self._adopted.outbox.count < self._adopted_events:
            self._undelivered.clear()
        first = since.astimezone(UTC).date().isoformat()
        return sum(micros for (of, day), micros in self._undelivered.items() if of == owner and day >= first)

    async def before(self, scope: Scope, context: RequestContext) -> None:
        if scope["method"] != "POST" or self.worker is None or self.worker.writer is None:
            return
        writer = self.worker.writer
        if writer.trouble and self._settings.when_full == "refuse":
            writer.flush()
            if writer.trouble:
                raise UnavailableError(
                    "Usage cannot be recorded now, so requests are refused (usage.when_full: refuse). Try again later.",
                    code="usage_unavailable",
                )
        context.usage_recorder = writer.recorder(context)

    def adopt(self, context: RequestContext) -> None:
        if self.worker is not None and self.worker.writer is not None:
            context.usage_recorder = self.worker.writer.recorder(context)

    def after(self, context: RequestContext, outcome: Outcome) -> None:
        if context.usage_recorder is not None:
            # For requests whose endpoint began an answer and did not end it.
            context.usage_recorder.end(outcome)
            # Break the reference cycle between recorder and context, which would stay until the
            # garbage collector runs.
            context.usage_recorder = None

    async def _adopt(self) -> None:
        """Deliver the outboxes that dead gateways left, and delete their folders afterwards."""
        while True:
            abandoned: list[FolderLock] = []
            self._undelivered.clear()
            try:
                for found in lock_abandoned_folders(self._root):
                    try:
                        elsewhere = await self._billed_elsewhere(found)
                        if elsewhere is None:
                            found.release()
                            continue
                        lock = await asyncio.to_thread(self._prepare, found, elsewhere)
                    except Exception:
                        # An outbox that fails must not delay the delivery of the others.
                        log.exception("The outbox in %s cannot be opened now; the gateway retries.", found.folder)
                        found.release()
                        continue
                    if lock is not None:
                        abandoned.append(lock)
                while abandoned:
                    self._limit_own_outbox(sum(lock.size for lock in abandoned))
                    lock = abandoned.pop(0)
                    try:
                        await self._deliver_abandoned(lock)
                    except Exception:
                        log.exception("The outbox in %s cannot be delivered now; the gateway retries.", lock.folder)
                    finally:
                        lock.release()
                self._limit_own_outbox(0)
                await self._report_older_outboxes()
            except Exception:
                log.exception("The outboxes of dead gateways cannot be delivered now; the gateway retries.")
            finally:
                for lock in abandoned:
                    lock.release()
            self._adopted_all.set()
            await asyncio.sleep(ADOPT_INTERVAL)

    async def _report_older_outboxes(self) -> None:
        """Log each dead gateway of which the ledger has later events than its outbox ever had.

        The files of a restored folder agree with each other, so that only the ledger knows.
        """
        with suppress(LlmopsError):
            for gateway, written in list(self._written.items()):
                if (number := await self._sink.next_number(gateway)) > written:
                    log.error(
                        "The outbox of the gateway %s ended before event %d, but the ledger has all events before %d. "
                        "It is an older copy, or its disk lost the end: later events that the ledger lacks are not "
                        "billed. Never restore a copy of an outbox.",
                        gateway, written, number,
                    )  # fmt: skip
                del self._written[gateway]

    def _limit_own_outbox(self, others: int) -> None:
        """Limit this gateway's outbox to the bytes that the outboxes of dead gateways leave.

        `others` is the size of these outboxes in bytes.
        """
        assert self.worker is not None
        self.worker.outbox.limit(max(self._settings.bytes - others, 0))

    async def _deliver_abandoned(self, lock: FolderLock) -> None:
        outbox = await asyncio.to_thread(UsageOutbox, lock.folder)
        worker = self._adopted = OutboxWorker(lock, outbox, self._sink)
        self._adopted_events = outbox.count
        try:
            await worker.delivery.drain()
            self._undelivered.clear()
        finally:
            self._adopted = None
            await worker.close()

    async def _billed_elsewhere(self, lock: FolderLock) -> frozenset[str] | None:
        """Return the ids of a dead gateway's answers that other gateways billed.

        Return None as long as another gateway may still continue one of the answers, because the
        gateway that bills it is then undecided.
        """
        if self.find_owners is None:
            return frozenset()
        try:
            shared = await asyncio.to_thread(shared_answer_ids, lock.folder)
        except OSError:
            return frozenset()  # `_prepare` reports the error.
        if not shared:
            return frozenset()
        owners = await self.find_owners(shared)
        if owners is None or UsageOwner.OFFERED in owners.values():
            return None
        return frozenset(one for one, owner in owners.items() if owner is UsageOwner.ELSEWHERE)

    def _prepare(self, lock: FolderLock, elsewhere: frozenset[str]) -> FolderLock | None:
        """Complete the outbox of a dead gateway with the answers in its slots.

        The readable events of a damaged outbox are copied to a new outbox.

        Returns:
            The lock of the folder that holds the events now; None if no events are left.
        """
        outbox = None
        try:
            set_aside_special_files(lock.folder, SQLITE_FILES)
            outbox = UsageOutbox(lock.folder)
            written = recover_open_answers(lock.folder, outbox, self._prices, elsewhere)
            self._written[lock.folder.name] = written
            # A new object, because the event loop may read the old one.
            self._undelivered = self._undelivered + outbox.costs()
        except Exception as error:  # noqa: BLE001  any error is damage
            if is_machine_error(error) or (isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS):
                log.error("The outbox in %s cannot be opened now (%s); the gateway retries.", lock.folder, error)
                lock.release()
                return None
            return self._salvage(lock, error, elsewhere)
        finally:
            if outbox is not None:
                outbox.close()
        if outbox.count:
            return lock
        lock.remove()
        return None

    def _salvage(self, damaged: FolderLock, error: Exception, elsewhere: frozenset[str]) -> FolderLock:
        """Copy the readable events of a damaged outbox to a new one, and set the damaged one aside.

        `elsewhere` has the ids of answers that other gateways billed.
        """
        lock = lock_new_folder(self._root)
        try:
            with closing(UsageOutbox(lock.folder)) as outbox:
                events = salvage_events(damaged.folder)
                while batch := list(islice(events, _SALVAGE_BATCH)):
                    outbox.add(batch)
                count = outbox.count
                try:
                    recover_open_answers(damaged.folder, outbox, self._prices, elsewhere)
                except OSError as unreadable:
                    log.error(
                        "The requests that ran when a gateway died cannot be billed, because their records cannot be "
                        "read (%s).",
                        unreadable,
                    )
            kept = damaged.quarantine()
        except BaseException:
            lock.release()
            raise
        log.error(
            "The outbox of a gateway that died is damaged (%s). %d of its events can be read and are billed; the "
            "others are not. The damaged files are kept in %s.",
            error, count, kept,
        )  # fmt: skip
        return lock


def create_usage_check(settings: GatewaySettings, prices: Prices | None = None) -> UsageCheck | None:
    """Return the check, or None without a store.

    Raises:
        InputError: Kafka is set without a store or without a signing key.
        MissingDependencyError: A library is not installed.
    """
    if settings.store is None:
        if settings.kafka is not None:
            raise InputError(
                "The setting `kafka` needs the setting `store`, because the store confirms which events have arrived."
            )
        return None
    try:
        sink = _create_sink(settings, settings.store)
    except ModuleNotFoundError as error:
        subject, extra = ("Kafka", "kafka") if error.name == "aiokafka" else ("A store", "store")
        raise missing_extra(f"{subject} needs {error.name}, which is not installed", extra) from error
    return UsageCheck(_root(settings, settings.store), settings.usage, sink, prices or NoPrices())


def create_billing(settings: GatewaySettings) -> Billing | None:
    """Return the prices, or None without a store or with --open: callers are then not billed."""
    if settings.store is None or settings.open:
        return None
    from llmops.gateway.usage.billing import Billing

    return Billing(settings.store)


def _create_sink(settings: GatewaySettings, store: str) -> UsageSink:
    from llmops.gateway.usage.ledger_sink import LedgerSink

    if settings.kafka is None:
        return LedgerSink(store)
    from llmops.gateway.usage.kafka import KafkaSink

    return KafkaSink(settings.kafka, LedgerSink(store))


def _root(settings: GatewaySettings, store: str) -> Path:
    """Return the folder of the outboxes for one store.

    The folder's name depends on the database and not on how its URL is written. Events of one store
    never go to another store.
    """
    from llmops.gateway.usage.ledger_sink import place_of

    name = hashlib.sha256(place_of(store).encode()).hexdigest()[:12]
    if settings.usage.outbox is not None:
        return settings.usage.outbox / name
    root = cache_dir() / "usage" / name
    check_own_folders(root, cache_dir())
    return root
