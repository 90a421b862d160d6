"""A cache in front of a directory, which bounds the look-ups per credential."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from llmops.background import cancel_tasks
from llmops.gateway.auth.directory import CredentialUnavailableError, Directory
from llmops.gateway.errors import InvalidKeyError, PrematureTokenError, UnavailableError
from llmops.gateway.interfaces import Caller
from llmops.gateway.logging_setup import request_logger

log = request_logger(__name__)

FRESH_SECONDS = 30.0
STALE_SECONDS = 3600.0
#: Seconds between two attempts to use a directory that is unavailable: short, so that callers get
#: in soon after its return.
RETRY_SECONDS = 1.0
#: Maximum number of valid credentials in the cache, which bounds the memory.
MAX_KNOWN_CREDENTIALS = 100_000
#: Maximum number of invalid credentials in the cache. The bound is separate, so that an attacker's
#: invalid credentials cannot evict the credentials of callers.
MAX_REJECTED_CREDENTIALS = 20_000
EXPIRED_KEY_MESSAGE = "This API key has expired; use another."


@dataclass(frozen=True, slots=True)
class _KnownCredential:
    caller: Caller
    at: float


@dataclass(frozen=True, slots=True)
class _RejectedCredential:
    """A credential that the directory refused.

    Attributes:
        reason: A sentence for the client; empty if no caller has this credential.
        at: The time of the refusal, in seconds of the cache's clock.
    """

    reason: str
    at: float


_LookupResult = _KnownCredential | _RejectedCredential | UnavailableError


class CachedDirectory(Directory):
    """A directory that remembers callers and refusals of another directory for `fresh` seconds.

    While the wrapped directory is unavailable, callers are remembered for `stale` seconds.

    In the second half of the `fresh` seconds, the next request of a caller starts a new look-up in
    the background, so that no request of an active caller waits. Credentials are stored as SHA-256
    digests.
    """

    def __init__(
        self,
        directory: Directory,
        fresh: float = FRESH_SECONDS,
        stale: float = STALE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.foreign = directory.foreign
        self._directory, self._fresh, self._stale, self._clock = directory, fresh, stale, clock
        self._known: dict[bytes, _KnownCredential] = {}
        self._refused: dict[bytes, _RejectedCredential] = {}
        self._looking: dict[bytes, asyncio.Task[_LookupResult]] = {}
        self._away_since: float | None = None
        self._tried = 0.0
        self._any: bool | None = None
        self._any_at = 0.0

    def takes(self, credential: str) -> bool:
        return self._directory.takes(credential)

    def known(self, credential: str) -> Caller | None:
        return self._fresh_one(_digest(credential), credential, self._clock())

    async def find(self, credential: str) -> Caller | None:
        digest, now = _digest(credential), self._clock()
        fresh = self._fresh_one(digest, credential, now)
        if fresh is not None:
            return fresh
        known = self._known.get(digest)
        if known is not None and now - known.at >= self._stale:
            known = None
        refused = self._refused.get(digest)
        if refused is not None and now - refused.at < self._fresh:
            return _raise_rejection(refused)
        if known is not None and self._away_since is not None:
            # A request that waits for a store that hangs is closed first when connections run out.
            self._look(digest, credential)
            return _require_unexpired(known.caller)
        found = await self._looked_up(digest, credential)
        if isinstance(found, UnavailableError):
            if known is None:
                raise found
            return _require_unexpired(known.caller)
        return _require_unexpired(found.caller) if isinstance(found, _KnownCredential) else _raise_rejection(found)

    async def has_credentials(self) -> bool:
        """Return True if a credential was ever created.

        The answer True is remembered forever; the answer False is checked again every second.
        """
        if self._any:
            return True
        now = self._clock()
        if self._any is None or now - self._any_at >= RETRY_SECONDS:
            try:
                self._any = await self._directory.has_credentials()
            except UnavailableError:
                if self._any is None:
                    raise
            self._any_at = now
        return bool(self._any)

    async def ended(self, callers: Collection[Caller]) -> Collection[Caller]:
        return await self._directory.ended(callers)

    async def close(self) -> None:
        await cancel_tasks(*self._looking.values())
        await self._directory.close()

    def _fresh_one(self, digest: bytes, credential: str, now: float) -> Caller | None:
        known = self._known.get(digest)
        if known is None or now - known.at >= self._fresh:
            return None
        if now - known.at > self._fresh / 2:
            self._look(digest, credential)
        return _require_unexpired(known.caller)

    async def _looked_up(self, digest: bytes, credential: str) -> _LookupResult:
        task = self._look(digest, credential)
        # Shielded: a client that leaves must not end the look-up that other requests wait for.
        found = keys_unavailable() if task is None else await asyncio.shield(task)
        return CredentialUnavailableError() if isinstance(found, CredentialUnavailableError) else found

    def _look(self, digest: bytes, credential: str) -> asyncio.Task[_LookupResult] | None:
        """Return the running look-up of this credential; start a look-up if none is running.

        Return None while the directory is unavailable.
        """
        task = self._looking.get(digest)
        if task is None:
            if self._away_since is not None and self._clock() - self._tried < RETRY_SECONDS:
                return None
            task = self._looking[digest] = asyncio.create_task(self._ask(digest, credential), name="find-caller")
            task.add_done_callback(lambda _: self._looking.pop(digest, None))
        return task

    async def _ask(self, digest: bytes, credential: str) -> _LookupResult:
        now, before = self._clock(), self._tried
        try:
            if self._away_since is not None:
                # A token that waits for its issuer's keys, or is refused, does not reach the store,
                # and so does not count as an attempt to use the store.
                await self._directory.check(credential)
                now, before = self._clock(), self._tried
                if now - before < RETRY_SECONDS:
                    return keys_unavailable()
                self._tried = now
            caller = await self._directory.find(credential)
        except CredentialUnavailableError as error:
            if error.detail:
                log.warning(error.detail)
            return error
        except UnavailableError as error:
            self._note_away(error)
            return keys_unavailable()
        except InvalidKeyError as error:
            # A credential refused for its form did not reach the directory. Restore the time of the
            # last attempt, so that strangers with invented tokens cannot postpone the next attempt.
            if self._tried == now:
                self._tried = before
            refused = _RejectedCredential(error.message, self._clock())
            return refused if isinstance(error, PrematureTokenError) else self._keep(digest, refused)
        if self._away_since is not None:
            log.warning("Keys can be looked up again after %.0f s.", self._clock() - self._away_since)
            self._away_since = None
        return self._keep(
            digest, _KnownCredential(caller, self._clock()) if caller else _RejectedCredential("", self._clock())
        )

    def _keep(
        self, digest: bytes, found: _KnownCredential | _RejectedCredential
    ) -> _KnownCredential | _RejectedCredential:
        self._known.pop(digest, None)
        self._refused.pop(digest, None)
        if isinstance(found, _KnownCredential):
            _put(self._known, digest, found, MAX_KNOWN_CREDENTIALS)
        else:
            _put(self._refused, digest, found, MAX_REJECTED_CREDENTIALS)
        return found

    def _note_away(self, error: UnavailableError) -> None:
        self._tried = self._clock()
        if self._away_since is None:
            self._away_since = self._tried
            log.error(
                "Keys cannot be looked up; keys in use stay valid for %.0f s. %s", self._stale, error.full_message
            )


def _digest(credential: str) -> bytes:
    return hashlib.sha256(credential.encode()).digest()


def _put(kept: dict, digest: bytes, found: _KnownCredential | _RejectedCredential, most: int) -> None:
    """Store `found` in `kept` as the newest entry, and drop the oldest beyond `most` entries."""
    kept[digest] = found
    if len(kept) > most:
        del kept[next(iter(kept))]


def _require_unexpired(caller: Caller) -> Caller:
    if caller.until <= time.time():
        raise InvalidKeyError(EXPIRED_KEY_MESSAGE)
    return caller


def _raise_rejection(refused: _RejectedCredential) -> Caller | None:
    if refused.reason:
        raise InvalidKeyError(refused.reason)
    return None


def keys_unavailable(detail: str | None = None) -> UnavailableError:
    """Return the error for credentials that cannot be checked now.

    Each call creates a new error, because an error that is raised again grows its traceback.

    Args:
        detail: The cause, for the log only.
    """
    return UnavailableError("API keys cannot be looked up now; try again.", code="keys_unavailable", detail=detail)
