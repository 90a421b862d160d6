"""A cache of an identity provider's public keys.

Keys are fetched when they are needed, and kept while the provider is unavailable.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from llmops.background import cancel_tasks
from llmops.clocks import wait_with_timeout
from llmops.fair_client import fair_client
from llmops.gateway.auth.directory import CredentialUnavailableError
from llmops.gateway.auth.verification_keys import VerificationKey, read_verification_key, signature_algorithms
from llmops.gateway.errors import UnavailableError
from llmops.untrusted_text import escape_unsafe
from llmops.urls import fetch_bounded, is_secure_url, without_secrets

log = logging.getLogger(__name__)

#: Minimum seconds between two fetches of the keys. Strangers can send invented key ids, and each
#: unknown id asks for a fetch.
MIN_REFRESH_INTERVAL = 2.0
#: Maximum factor of that interval after a successful fetch. Each 429 of the issuer doubles the
#: factor, and each success lowers it by a tenth, so that strangers cannot use up an issuer that
#: allows 5 fetches a minute.
MAX_SLOWDOWN = 20.0
#: Maximum factor of that interval after 429s in a row, times a random number up to 1.5. A gateway
#: that was refused tries again sooner than one that was served: otherwise those that have a new key
#: use up the issuer's allowance before the others get the key.
MAX_RETRY_SLOWDOWN = 5.0
#: Seconds that one fetch may take before the provider counts as unavailable.
FETCH_TIMEOUT = 5.0
#: Maximum number of tokens that wait for the next fetch because their key id is unknown. Strangers
#: can send such tokens.
MAX_WAITING = 1000
_MAX_BYTES = 2**20
#: Maximum number of key ids that are kept from earlier fetches.
_MAX_KEPT = 1000
#: Maximum number of key ids whose weakness is logged.
_MAX_WARNINGS = 100
DISCOVERY_PATH = "/.well-known/openid-configuration"
#: The keys of an id, after the time of the last fetch that returned them.
_Fetched = tuple[float, Sequence[VerificationKey]]


class JwksCache:
    """A cache of the public keys of `issuer`.

    The keys are fetched from `url`, or from the address in the issuer's discovery document. A fetch
    starts every `refresh` seconds in the background, and at once for an unknown key id, but at most
    once every `MIN_REFRESH_INTERVAL` seconds, and less often if the issuer answers 429.

    A key that a fetch does not return any longer counts until `refresh` seconds after the last
    fetch that returned the key: the servers of an issuer may publish different keys for a while.
    """

    def __init__(
        self, issuer: str, url: str | None, refresh: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer, self._url, self._refresh, self._clock = issuer, url, refresh, clock
        self._keys: Mapping[str | None, _Fetched] | None = None
        self._read_at = self._tried_at = float("-inf")
        self._slowdown = self._retry_slowdown = 1.0
        self._reading: asyncio.Task[None] | None = None
        self._client: httpx.AsyncClient | None = None
        self._away = False
        #: The number of fetches started, and the number of the fetch that returned the current
        #: keys.
        self._begun = self._keys_from = 0
        self._waiting = 0
        self._warned: set[str | None] = set()

    async def find(self, kid: str | None, algorithm: str) -> Any | None:
        """Return the key with this id for an algorithm, or None if the issuer has no such key.

        Keys of different types may share an id (RFC 7517, section 4.5). Among keys of one type, the
        first one counts.

        An unknown key id waits for the next fetch: strangers who invent ids must neither decide
        when the keys are fetched nor cause tokens with a new key to be refused.

        Args:
            kid: The key id in the token's header; None stands for the issuer's only key.
            algorithm: The signature algorithm, such as RS256.

        Raises:
            CredentialUnavailableError: The keys could not be fetched since the token arrived, or
                too many tokens wait.
            UnavailableError: No keys are known.
        """
        begun = self._begun
        if self._keys is None and (self._reading or self._slowdown == 1 or self._wait_time() <= 0):
            await asyncio.shield(self._read())
        elif self._usable(kid) and self._is_due():
            self._read()
        if self._keys is None:
            raise UnavailableError(
                "Tokens cannot be checked now, because their issuer's keys cannot be fetched; try again later.",
                code="keys_unavailable",
            )
        if not self._knows(kid, begun):
            await self._next_reading(kid, begun)
        return next((one.key for one in self._usable(kid) if algorithm in one.algorithms), None)

    def _usable(self, kid: str | None) -> Sequence[VerificationKey]:
        """Return the keys with this id that the last fetch returned, or one within `refresh` seconds."""
        fetched_at, keys = (self._keys or {}).get(kid, (self._read_at, ()))
        return keys if fetched_at == self._read_at or self._clock() - fetched_at < self._refresh else ()

    def _is_due(self) -> bool:
        return self._clock() - self._read_at >= self._refresh and self._wait_time() <= 0

    def _wait_time(self) -> float:
        """Return the seconds until the next fetch may start; zero or less if it may start now."""
        slowdown = self._retry_slowdown if self._retry_slowdown > 1 else self._slowdown
        return MIN_REFRESH_INTERVAL * slowdown - (self._clock() - self._tried_at)

    async def _next_reading(self, kid: str | None, begun: int) -> None:
        """Wait until the key `kid` is known or a fetch that started after number `begun` has ended.

        A fetch that is already running may return the keys from before a rotation.

        Raises:
            CredentialUnavailableError: The fetch failed, or too many tokens wait.
        """
        if self._waiting >= MAX_WAITING:
            raise CredentialUnavailableError
        self._waiting += 1
        try:
            if self._reading is not None:
                await asyncio.shield(self._reading)
            left = self._wait_time()
            if self._reading is None and left > 0 and not self._knows(kid, begun):
                await asyncio.sleep(left)
            if not self._knows(kid, begun):
                await asyncio.shield(self._read())
        finally:
            self._waiting -= 1
        if not self._knows(kid, begun):
            raise CredentialUnavailableError

    def _knows(self, kid: str | None, begun: int) -> bool:
        """Return True if the key `kid` is known, or if a fetch after number `begun` has ended.

        After such a fetch, a key that is not known does not exist.
        """
        return self._keys_from > begun or bool(self._usable(kid))

    async def close(self) -> None:
        await cancel_tasks(self._reading)
        if self._client is not None:
            await self._client.aclose()

    def _read(self) -> asyncio.Task[None]:
        """Return the task that fetches the keys; start the task if none is running."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._try(), name="jwks")
            self._reading.add_done_callback(lambda _: setattr(self, "_reading", None))
        return self._reading

    async def _try(self) -> None:
        self._tried_at = self._clock()
        self._begun += 1
        try:
            keys = await wait_with_timeout(FETCH_TIMEOUT, self._fetch())
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError) as error:
            if not self._away:
                known = self._keys is not None
                kept = (
                    "the keys that were read last are used"
                    if known
                    else "its tokens are rejected until a fetch succeeds"
                )
                why = escape_unsafe(str(error)) or type(error).__name__
                log.error("The keys of %s cannot be read (%s); %s.", without_secrets(self._issuer), why, kept)
            self._away = True
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 429:
                self._slowdown = min(2 * self._slowdown, MAX_SLOWDOWN)
                self._retry_slowdown = random.uniform(1, 1.5) * min(self._retry_slowdown, MAX_RETRY_SLOWDOWN)
            return
        if self._away:
            log.warning("The keys of %s can be read again.", without_secrets(self._issuer))
        now = self._clock()
        # A token without a key id is checked by the only key of the last fetch.
        earlier: dict[str | None, _Fetched] = {
            kid: found for kid, found in (self._keys or {}).items() if kid is not None and self._usable(kid)
        }
        self._keys = (earlier if len(earlier) <= _MAX_KEPT else {}) | {kid: (now, found) for kid, found in keys.items()}
        self._away, self._read_at = False, now
        self._keys_from, self._slowdown, self._retry_slowdown = self._begun, max(1.0, 0.9 * self._slowdown), 1.0

    async def _fetch(self) -> Mapping[str | None, Sequence[VerificationKey]]:
        """Return the issuer's public signing keys by their ids.

        A single key is also found without an id.

        Raises:
            ValueError: The response is not a set of keys.
        """
        found = await self._json(self._url or await self._discovered())
        keys = found.get("keys")
        if not isinstance(keys, list):
            raise ValueError("the response has no list of keys named `keys`")
        fit = []
        for entry in keys:
            if key := read_verification_key(entry):
                fit.append((entry.get("kid"), key))
            elif signature_algorithms(entry):
                self._warn_of_weak(entry.get("kid"))
        # An issuer that starts or fails may publish an empty set for a moment.
        if not fit:
            raise ValueError("the response has no public key for signatures")
        by_id: dict[str | None, list[VerificationKey]] = {None: [fit[0][1]]} if len(fit) == 1 else {}
        for kid, key in fit:
            if isinstance(kid, str):
                by_id.setdefault(kid, []).append(key)
        return by_id

    def _warn_of_weak(self, kid: Any) -> None:
        name = escape_unsafe(kid) if isinstance(kid, str) else None
        if name in self._warned or len(self._warned) >= _MAX_WARNINGS:
            return
        self._warned.add(name)
        which = "A key without an id" if name is None else f"The key {name!r}"
        message = "%s of %s is weak or damaged, so tokens with its signature are refused; let the issuer replace it."
        log.warning(message, which, without_secrets(self._issuer))

    async def _discovered(self) -> str:
        document = await self._json(self._issuer.rstrip("/") + DISCOVERY_PATH)
        url = document.get("jwks_uri")
        if document.get("issuer") != self._issuer:
            raise ValueError(f"its discovery document names another issuer, {document.get('issuer')!r}")
        if not isinstance(url, str) or not is_secure_url(url):
            raise ValueError("its discovery document has no `jwks_uri` with https")
        return url

    async def _json(self, url: str) -> dict[str, Any]:
        if self._client is None:
            # Created on first use, because a client reads the system's certificates, which only
            # gateways with OpenID Connect need.
            self._client = fair_client(timeout=FETCH_TIMEOUT, follow_redirects=False)
        found = json.loads(await fetch_bounded(self._client, url, _MAX_BYTES, {"accept": "application/json"}))
        if not isinstance(found, dict):
            raise ValueError(f"{without_secrets(url)} is not a JSON object")
        return found
