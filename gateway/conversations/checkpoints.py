"""Checkpoints of running answers in Redis or Valkey, which any gateway can replay or continue.

For each answer, Redis has a record of the request, the tokens at four bytes each, and finally the
end of the answer. The text is decoded again from the tokens. Every gateway has a lease; the answers
of a gateway whose lease has expired are taken over by the others. A gateway whose answer was taken
over sends and bills nothing more of the answer.

        RUNNING on A ──A ends──▶ OVER, kept for a minute
             │  ▲
    lease of A expires  │ B continues it, as after the loss of a replica
             ▼  │
           TAKEN by B

A reader gets an event only once Redis has the event's tokens, so that the gateway that takes the
answer over knows everything that a client saw. The tokens of all answers are sent in one call per
`FLUSH_INTERVAL`. While Redis is unavailable, no event waits and no answer can be taken over.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from llmops.background import TaskSet, every
from llmops.gateway.errors import UnavailableError
from llmops.gateway.interfaces import UsageOwner
from llmops.gateway.ratelimit.fairness import FairShares
from llmops.gateway.redis_client import FAILURES, connect, reconnect
from llmops.input_files import MALFORMED
from llmops.untrusted_text import escape_unsafe
from llmops.urls import without_secrets

log = logging.getLogger(__name__)

#: Prefix of all keys, with the version of the stored data: gateways of different versions do not
#: continue each other's answers.
PREFIX = "{llmops:answers:2}"
#: Seconds between two writes of a gateway. On average, a token is delayed by half of this time.
FLUSH_INTERVAL = 0.02
#: Seconds between two reads of answers that other gateways generate: a delay that readers hardly
#: notice.
POLL_INTERVAL = 0.05
#: Seconds after which a call of Redis counts as failed.
TIMEOUT = 0.5
#: Seconds between two attempts to reach an unavailable Redis.
RETRY_INTERVAL = 0.5
#: Seconds for which an answer counts as being read after another gateway has read it.
READING_SECONDS = 3.0
#: Maximum number of answers in one call, which blocks Redis for a few milliseconds at most.
MAX_BATCH = 256
#: Size in bytes from which no further answer is sent or taken over in the same call. A call for more
#: than a megabyte takes longer than `TIMEOUT` on a busy machine.
MAX_BATCH_BYTES = 256 * 2**10
#: Size in bytes of an owner's new records that do not wait for tokens. With more than MAX_BATCH running
#: answers, tokens may never end.
SMALL_RECORDS_BYTES = 16 * 2**10
#: Maximum number of answers that a gateway takes over at once. The rest is left to other gateways
#: until the next time.
MAX_CLAIMED = 64
#: Maximum size of a record in bytes. An answer with a larger record cannot be taken over.
MAX_RECORD_BYTES = 1_000_000
#: Maximum size of all records of a gateway in bytes. One owner may use at most as much as remains
#: free.
MAX_RECORDS_BYTES = 256 * 2**20
#: Seconds for which Redis keeps an ended answer, for readers at other gateways.
KEPT_SECONDS = 60.0
#: Bit that marks the last token of a batch, and mask of the token's id. Batches are stored because
#: they determine where events begin.
_LAST, _TOKEN_MASK = 1 << 31, (1 << 31) - 1
_ONE_TOKEN = struct.Struct("<I")


def _checked(replies: Any, count: int | None, is_valid: Callable[[Any], bool] = lambda _: True) -> list[Any]:
    """Return the replies of a script after checking their number and form.

    Args:
        replies: The replies.
        count: The expected number of replies; None for any number.
        is_valid: Returns True for a valid reply.

    Raises:
        ResponseError: The replies are from another program.
    """
    if not isinstance(replies, list) or (count is not None and len(replies) != count):
        raise ResponseError("its reply has another form")
    if not all(map(is_valid, replies)):
        raise ResponseError("its reply has other values")
    return replies


def _is_damage(reply: Any) -> bool:
    """Return True if `reply` is Redis' error for a key that has a wrong type.

    The other keys of the same call are usable.
    """
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")


def _is_number(reply: Any) -> bool:
    return isinstance(reply, int)


def _is_read(reply: Any) -> bool:
    """Return True if the reply is an answer's tokens and end, or is empty."""
    return reply == [] or (_are_texts(reply, 2) and len(reply[0]) % _ONE_TOKEN.size == 0)


def _is_claim(reply: Any) -> bool:
    """Return True if the reply is an answer that another gateway left."""
    if not isinstance(reply, list) or len(reply) != 5 or not _are_texts(reply[:4], 4):
        return False
    _, _, cached, tokens, times = reply
    return (not cached or cached.isdigit()) and len(tokens) % 4 == 0 and isinstance(times, int)


def _has_id(reply: Any) -> bool:
    return isinstance(reply, list) and len(reply) == 5 and isinstance(reply[0], bytes) and reply[0].isascii()


def _are_texts(reply: Any, count: int) -> bool:
    return isinstance(reply, list) and len(reply) == count and all(isinstance(one, bytes) for one in reply)


class ClaimedAnswer(NamedTuple):
    """An answer that this gateway has taken over.

    Attributes:
        id: The id of the answer.
        record: The record of the request.
        cached_tokens: The number of the prompt's tokens that were in the engine's cache; None if
            unknown.
        tokens: The output tokens so far, as `encode_batch` writes them.
        times: The number of times that the answer was taken over.
    """

    id: str
    record: bytes
    cached_tokens: int | None
    tokens: bytes
    times: int


def encode_batch(tokens: Sequence[int]) -> bytes:
    """Return the encoded form of tokens that arrived together."""
    if len(tokens) == 1:
        return _ONE_TOKEN.pack(tokens[0] | _LAST)
    return struct.pack(f"<{len(tokens)}I", *tokens[:-1], tokens[-1] | _LAST)


def decode_batches(data: bytes) -> Iterator[list[int]]:
    """Yield the batches that `encode_batch` encoded, in their order."""
    batch: list[int] = []
    for (token,) in _ONE_TOKEN.iter_unpack(data):
        batch.append(token & _TOKEN_MASK)
        if token & _LAST:
            yield batch
            batch = []


class AnswerCheckpoint:
    """The checkpoint of one answer that this gateway generates.

    Attributes:
        id: The id of the answer.
        size: Size of all encoded tokens so far, in bytes.
        known: Size of the encoded tokens that Redis has, in bytes.
        on_change: Called when `known`, `holds` or a flag below has changed.
        lost: True if another gateway has the answer: it has taken the answer over, or continues it.
        registered: True if Redis has the answer, or gets it as soon as it is available.
        replaced: True if the owner continued the answer at another gateway, which bills the rest.
        stop: True if a client at another gateway stopped the answer.
        is_read_elsewhere: True if a client reads the answer at another gateway.
    """

    def __init__(self, store: CheckpointStore, answer_id: str, size: int = 0) -> None:
        self.id = answer_id
        self.size = self.known = size
        self.on_change: Callable[[], None] = lambda: None
        self.lost = self.replaced = self.stop = self.is_read_elsewhere = False
        self._store = store
        self._unsent = bytearray()
        self._record, self._record_bytes, self._is_taken_over = b"", 0, False
        self._slow_calls = 0
        self._end: bytes | None = None
        self.registered = False
        self._cached: int | None = None
        self._reply: asyncio.Future[None] | None = None

    @property
    def unsent_record_bytes(self) -> int:
        """Return the size of the record in bytes, 0 once Redis has it."""
        return len(self._record)

    @property
    def holds(self) -> bool:
        """Return True if readers must wait until Redis has the tokens."""
        return self.registered and self._store.up

    def add(self, tokens: Sequence[int], cached: int | None) -> None:
        """Add tokens that arrived together, and update the number of cached prompt tokens."""
        data = encode_batch(tokens)
        self._unsent += data
        self.size += len(data)
        self._cached = cached
        if self.registered:
            self._store.changed(self)

    def register(self, record: bytes) -> None:
        """Write the record of the answer, so that other gateways can find the answer.

        An empty record stands for an answer that was taken over, whose record Redis has already.
        """
        if record and self._store.writes(self.id):
            return  # This answer continues one whose end Redis does not have yet.
        if len(record) <= MAX_RECORD_BYTES and self._store.hold_record(self.id, len(record)):
            self._record_bytes = len(record)
            self._record, self.registered, self._is_taken_over = record, True, not record
            self._store.add(self, is_new=bool(record))

    async def is_owned(self) -> bool:
        """Return True if this gateway still owns the answer, or if Redis is unavailable."""
        if self.registered and self._store.up:
            self._reply = asyncio.get_running_loop().create_future()
            self._store.changed(self)
            await asyncio.wait({self._reply}, timeout=TIMEOUT)
        return not self.lost

    async def finish(self, end: bytes) -> bool:
        """Write the end of the answer. Return False if another gateway has taken the answer over.

        `end` is an encoded EndedAnswer. If Redis takes longer than `TIMEOUT` seconds, the result is
        True, and the end is written later.
        """
        if self._store.withdraw(self):
            self.registered = False
            self._store.release_record(self.id, self._record_bytes)
        if not self.registered:
            return not self.lost
        self._end = end
        return await self.is_owned()

    # -- for the store

    def pending(self) -> list[Any]:
        """Return the values of this answer for the Redis script that writes answers."""
        cached = "" if self._cached is None else self._cached
        taken = "1" if self._is_taken_over else ""
        return [self.id, self._record, cached, self.known, bytes(self._unsent), self._end or b"", taken]

    def count_failed_call(self) -> bool:
        """Count a failed call. Return True for the second with a large record, which was alone."""
        self._slow_calls += self.unsent_record_bytes > MAX_BATCH_BYTES
        return self._slow_calls > 1

    def acknowledge(self, sent: list[Any], reply: int) -> None:
        """Process the script's reply to the values that `pending` returned."""
        if reply < 0:
            # Redis does not know the answer: Redis lost its data, or the answer ran longer than
            # Redis keeps it.
            self.lost, self.replaced, self.registered = reply != -2, reply == -3, False
        else:
            self._record = b""
            del self._unsent[: len(sent[4])]
            self.known += len(sent[4])
            self.stop, self.is_read_elsewhere = bool(reply & 1), bool(reply & 2)
        if not self.registered or sent[5]:
            self._store.remove(self)
            self._store.release_record(self.id, self._record_bytes)
            self._record_bytes = 0
        answers_end = self._end is None or sent[5] or not self.registered
        if self._reply is not None and answers_end and not self._reply.done():
            self._reply.set_result(None)
        self.on_change()


def _owner(answer_id: str) -> str:
    """Return the owner part of a shared answer's id."""
    return answer_id.rpartition(":")[0]


def _fair_order(changed: Iterable[AnswerCheckpoint]) -> list[AnswerCheckpoint]:
    """Sort answers by the size of the records of their owner up to them.

    Tokens and an owner's first SMALL_RECORDS_BYTES come in the order of their changes, then records
    of an owner who sends few before those of an owner who sends many.
    """
    used: Counter[str] = Counter()

    def position(one: AnswerCheckpoint) -> int:
        owner = _owner(one.id)
        used[owner] += one.unsent_record_bytes
        return used[owner] // SMALL_RECORDS_BYTES if one.unsent_record_bytes else 0

    return sorted(changed, key=position)


class FollowedTokens:
    """The tokens of an answer that another gateway generates, as Redis receives them.

    Attributes:
        id: The id of the answer.
        deliver: Called with new encoded tokens and the encoded end; with None if Redis is
            unavailable or does not know the answer.
        offset: Size of the encoded tokens delivered so far, in bytes.
        is_new: True until the tokens that Redis has at first are delivered.
    """

    def __init__(self, answer_id: str, deliver: Callable[[tuple[bytes, bytes] | None], None]) -> None:
        self.id, self.deliver, self.offset, self.is_new = answer_id, deliver, 0, True


class CheckpointStore:
    """The checkpoints of all gateways that use the Redis at `url`."""

    def __init__(self, url: str, lease: float) -> None:
        """Create the store. No connection is made before `start`.

        Args:
            url: The URL of the Redis.
            lease: Seconds after which the answers of a silent gateway are taken over.
        """
        self.up = False
        self.lease = lease
        self._url, self._gateway = url, secrets.token_hex(8)
        self._client = connect(url, TIMEOUT, TIMEOUT)
        scripts = (
            Path(__file__).with_name(f"checkpoint_{name}.lua").read_text() for name in ("write", "claim", "read")
        )
        self._write_script, self._claim_script, self._read_script = map(self._client.register_script, scripts)
        self._answers: dict[str, AnswerCheckpoint] = {}
        # Answers that began while Redis was unavailable, of which Redis has nothing.
        self._waiting: dict[str, AnswerCheckpoint] = {}
        self._records = FairShares(MAX_RECORDS_BYTES)
        self._changed: dict[str, AnswerCheckpoint] = {}
        self._followed: set[FollowedTokens] = set()
        # For answers of dead gateways that Redis does not know: the end of the lease in which a
        # gateway that took the answer over notes this.
        self._unknown_until: dict[str, float] = {}
        self._wake, self._follow = asyncio.Event(), asyncio.Event()
        self._tasks = TaskSet()
        self._trouble = False
        # Ids of answers that are not written any longer, of which Redis may have received a part.
        self._given_up: list[str] = []
        # False if Redis may have given this gateway answers in a reply that did not arrive.
        self._is_claim_heard = True
        self._up_since = 0.0

    async def start(self, adopt: Callable[[ClaimedAnswer], None]) -> None:
        """Connect, and from now on pass the answers of lost gateways to `adopt`."""
        await self._try(self._write, [])
        self._tasks.start(self._write_forever(), "checkpoints")
        self._tasks.start(self._poll_forever(), "followed-answers")
        self._tasks.start(every(self.lease / 4, partial(self._claim, adopt)), "claim-answers")

    async def close(self) -> None:
        """Write the last tokens, and offer the running answers to other gateways."""
        await self._tasks.cancel()
        waiting = _fair_order(self._answers.values())
        with suppress(*FAILURES):
            await self._write(waiting, lease=-1.0)
            while waiting:
                await self._write(waiting, lease=-1.0)
        with suppress(*FAILURES):
            await self._client.aclose()

    def checkpoint(self, answer_id: str, size: int = 0) -> AnswerCheckpoint:
        """Return a checkpoint for an answer of which Redis has `size` bytes of encoded tokens."""
        return AnswerCheckpoint(self, answer_id, size)

    def add(self, one: AnswerCheckpoint, is_new: bool) -> None:
        """Write an answer from now on; a new one from the moment on in which Redis is available."""
        if is_new and not self.up:
            self._waiting[one.id] = one
        else:
            self._answers[one.id] = one
            self.changed(one)

    def writes(self, answer_id: str) -> bool:
        """Return True if Redis still has to receive an answer of this gateway with this id."""
        return answer_id in self._answers or answer_id in self._waiting

    def withdraw(self, one: AnswerCheckpoint) -> bool:
        """Forget an answer that waits for Redis. Return False if Redis may have the answer."""
        return self._waiting.pop(one.id, None) is not None

    def remove(self, one: AnswerCheckpoint) -> None:
        self._answers.pop(one.id, None)

    def hold_record(self, answer_id: str, size: int) -> bool:
        """Reserve `size` bytes for a record.

        Return False if the owner's share or the total is used up.
        """
        return self._records.take(_owner(answer_id), size)

    def release_record(self, answer_id: str, size: int) -> None:
        """Release the bytes of a record once Redis has dropped the record."""
        if size:
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self._records.give_back, _owner(answer_id), size)

    def changed(self, one: AnswerCheckpoint) -> None:
        """Include the answer of `one` in the next call of the Redis script that writes answers."""
        if one.id in self._answers:
            self._changed[one.id] = one
            self._wake.set()

    # -- answers of other gateways

    async def record(self, answer_id: str) -> bytes | None:
        """Return the record of an answer, or None if Redis does not know the answer.

        Raises:
            UnavailableError: Redis is unavailable.
        """
        found = await self._asked(self._client.hget(f"{PREFIX}:answer:{answer_id}", "record"))
        return found if isinstance(found, bytes) else None

    async def request_stop(self, answer_id: str) -> None:
        """Ask the gateway that generates an answer to end the answer.

        Raises:
            UnavailableError: Redis is unavailable.
        """
        await self._asked(self._client.hset(f"{PREFIX}:answer:{answer_id}", "stop", "1"))

    def follow(self, tokens: FollowedTokens) -> None:
        """Start to deliver the tokens of an answer."""
        self._followed.add(tokens)
        self._follow.set()

    def unfollow(self, tokens: FollowedTokens) -> None:
        self._followed.discard(tokens)

    async def usage_owners(self, answer_ids: Sequence[str]) -> Mapping[str, UsageOwner] | None:
        """Return the gateway that bills each answer of a dead gateway, by the answer's id.

        Return None if Redis is unavailable. An answer that Redis does not know counts as OFFERED
        for one lease: if Redis has lost its data, the gateway that took the answer over notes this
        within the lease.
        """
        keys = [f"{PREFIX}:{kind}:{one}" for one in answer_ids for kind in ("answer", "billed")]
        try:
            pipe = self._client.pipeline(transaction=False)
            for answer, billed in zip(keys[::2], keys[1::2], strict=True):
                pipe.hexists(answer, "record")
                pipe.hexists(answer, "end")
                pipe.exists(billed)
            replies = await pipe.execute(raise_on_error=False)
            # No gateway continues an answer whose record is damaged.
            found = [False if _is_damage(one) else one for one in replies]
            found = _checked(found, 3 * len(answer_ids), _is_number)
        except FAILURES:
            return None
        owners, now = {}, asyncio.get_running_loop().time()
        for one, has_record, has_end, billed in zip(answer_ids, found[::3], found[1::3], found[2::3], strict=True):
            is_offered = has_record and not has_end
            if not has_record:
                is_offered = now < self._unknown_until.setdefault(one, now + self.lease)
            if is_offered and not billed:
                owners[one] = UsageOwner.OFFERED
            else:
                owners[one] = UsageOwner.ELSEWHERE if billed else UsageOwner.HERE
                self._unknown_until.pop(one, None)
        return owners

    async def _asked(self, asked: Any) -> Any:
        try:
            return await asked
        except FAILURES as error:
            raise UnavailableError(
                "Answers of other gateways cannot be read now, because their Redis is unavailable; try again.",
                code="streams_unavailable",
                detail=str(error),
            ) from error

    # -- the three tasks

    async def _write_forever(self) -> None:
        loop, heartbeat = asyncio.get_running_loop(), self.lease / 4
        next_beat = loop.time() + heartbeat
        while True:
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout_at(next_beat):
                    await self._wake.wait()
            self._wake.clear()
            began = loop.time()
            if began >= next_beat:
                self._changed.update(self._answers)
                next_beat = began + heartbeat
            waiting, self._changed = _fair_order(self._changed.values()), {}
            # After an outage, a call without answers shows that Redis is available again: a record for
            # which a call is too slow must not hold up the others.
            was_up = self.up
            is_written = await self._try(self._write, waiting if was_up else [])
            if was_up and not is_written and waiting and waiting[0].count_failed_call():
                # Its next calls would time out, too, and no lost answer would be taken over meanwhile.
                slow = waiting.pop(0)
                self._given_up.append(slow.id)
                slow.acknowledge(slow.pending(), -2)
            self._changed = {one.id: one for one in waiting} | self._changed
            if not is_written:
                await reconnect(self._client)
                await asyncio.sleep(RETRY_INTERVAL)
            elif waiting:
                self._wake.set()
            else:
                await asyncio.sleep(max(0.0, began + FLUSH_INTERVAL - loop.time()))

    async def _write(self, waiting: list[AnswerCheckpoint], lease: float | None = None) -> None:
        """Write the first of the answers in one call, and remove them from `waiting`."""
        if self._given_up:
            kinds = ("answer", "tokens")
            await self._client.delete(*(f"{PREFIX}:{kind}:{one}" for one in self._given_up for kind in kinds))
            self._given_up.clear()
        sent: list[list[Any]] = []
        size = 0
        for one in waiting[:MAX_BATCH]:
            values = one.pending()
            size += len(values[1]) + len(values[4])
            if sent and size > MAX_BATCH_BYTES:
                break
            sent.append(values)
        milliseconds = round((lease or self.lease) * 1000)
        args: list[Any] = [self._gateway, milliseconds, *(value for one in sent for value in one)]
        replies = _checked(await self._write_script(keys=[PREFIX], args=args), len(sent), _is_number)
        batch = waiting[: len(sent)]
        del waiting[: len(sent)]
        for one, values, reply in zip(batch, sent, replies, strict=True):
            one.acknowledge(values, reply)

    async def _claim(self, adopt: Callable[[ClaimedAnswer], None]) -> None:
        # After an outage of Redis every lease has expired. Wait for one lease, so that gateways can
        # renew theirs.
        if not self.up or asyncio.get_running_loop().time() - self._up_since < self.lease:
            return
        left = MAX_CLAIMED
        with suppress(*FAILURES):
            while left > 0:
                known = [] if self._is_claim_heard else ["1", *self._answers]
                self._is_claim_heard = False
                args: list[Any] = [self._gateway, round(self.lease * 1000), left, MAX_BATCH_BYTES, *known]
                claimed = _checked(await self._claim_script(keys=[PREFIX], args=args), None, _has_id)
                for reply in claimed:
                    await self._take(reply, adopt)
                self._is_claim_heard = True
                left = left - len(claimed) if claimed else 0

    async def _take(self, reply: list[Any], adopt: Callable[[ClaimedAnswer], None]) -> None:
        one, record, cached, tokens, times = reply
        if _is_claim(reply):
            with suppress(*MALFORMED):
                adopt(ClaimedAnswer(one.decode(), record, int(cached) if cached else None, tokens, times))
                return
        log.error(
            "The answer %s of a lost gateway is damaged in Redis. It is not continued, and is deleted.",
            escape_unsafe(one.decode()),
        )
        # The outbox of the lost gateway bills the tokens generated so far.
        await self._client.delete(*(f"{PREFIX}:{kind}:{one.decode()}" for kind in ("answer", "tokens")))

    async def _poll_forever(self) -> None:
        while True:
            await self._follow.wait()
            if not self._followed:
                self._follow.clear()
                continue
            known = [one for one in self._followed if not one.is_new]
            new = [one for one in self._followed if one.is_new]
            for start in range(0, len(known), MAX_BATCH):
                await self._poll(known[start : start + MAX_BATCH])
            # Whole answers, of half a megabyte each, do not fit into one call.
            for one in new:
                await self._poll([one])
            await asyncio.sleep(POLL_INTERVAL)

    async def _poll(self, followed: Sequence[FollowedTokens]) -> None:
        places = [value for one in followed for value in (one.id, one.offset)]
        args: list[Any] = [round(READING_SECONDS * 1000), *places]
        try:
            replies = _checked(await self._read_script(keys=[PREFIX], args=args), len(followed))
        except FAILURES:
            replies = [None] * len(followed)
        for one, reply in zip(followed, replies, strict=True):
            is_known = reply and _is_read(reply)
            if is_known:
                one.offset, one.is_new = one.offset + len(reply[0]), False
            one.deliver((reply[0], reply[1]) if is_known else None)

    async def _try(self, work: Callable[..., Awaitable[None]], *args: Any) -> bool:
        """Call Redis, and return True on success. The log gets one line per outage."""
        try:
            await work(*args)
        except FAILURES as error:
            if not self._trouble:
                log.error(
                    "Redis at %s, which keeps running answers, is not usable (%s). Until it answers, running answers "
                    "are lost with their gateway.",
                    without_secrets(self._url),
                    str(error) or type(error).__name__,
                )
            self._trouble, self.up = True, False
            for one in list(self._answers.values()):
                one.on_change()
            return False
        if not self.up:
            self.up, self._up_since = True, asyncio.get_running_loop().time()
            waiting, self._waiting = self._waiting, {}
            self._answers |= waiting
            for one in waiting.values():
                self.changed(one)
            if self._trouble:
                log.warning("Redis answers again; running answers survive the loss of their gateway again.")
            self._trouble = False
        return True
