"""Attacks with tokens: hostile claims and headers, hostile key sets, and strangers who disturb the tokens of others."""

import asyncio
import gzip
import json
import random
import threading
import time
import tracemalloc
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm
from sqlalchemy import Engine
from sqlalchemy.event import listen, remove
from sqlalchemy.exc import DBAPIError

from llmops.gateway.auth import jwks as jwks_module
from llmops.gateway.auth import keys
from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.directory import Identity
from llmops.gateway.auth.jwks import MIN_REFRESH_INTERVAL, JwksCache
from llmops.gateway.auth.keys import KeyDirectory
from llmops.gateway.errors import InvalidKeyError, UnavailableError
from llmops.gateway.interfaces import Caller
from llmops.store.accounts.key_secrets import hash_secret
from llmops.store.accounts.keys import require_key, rotate_key
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant, delete_tenant
from llmops.store.audit import AuditContext, list_audit_entries
from tests.attacks.harness import MIB, scaled
from tests.gateway.test_oidc import Issuer, tokens_of
from tests.support.accounts import add_key
from tests.support.pages import Page, PageServer
from tests.support.virtual_time import run_in_virtual_time

BY = AuditContext("cli:tester", datetime.now(UTC))
#: Callers whose tokens must not notice what another caller sends.
OTHERS = scaled(10, 60)


@pytest.fixture(scope="module")
def issuer():
    made = Issuer()
    yield made
    made.server.shutdown()
    made.server.server_close()


@asynccontextmanager
async def tokens_at(issuer, directory=None, **options):
    async with tokens_of(issuer, members=directory, **options) as tokens:
        yield tokens
    if directory is not None:
        await directory.close()


async def create_tenants(store, *names: str) -> None:
    async with store.write() as connection:
        for name in names:
            await create_tenant(connection, name, Limits(), BY)


async def outcome(tokens, token: str) -> str:
    """Return `caller`, `refused` or `undecided`. Anything else that is raised is a fault."""
    try:
        await tokens.find(token)
    except InvalidKeyError as error:
        return "refused" if error.message.isprintable() else error.message
    except UnavailableError:
        return "undecided"
    return "caller"


def signed(issuer, claims: dict) -> str:
    """Return a token with these claims, also those that no library writes."""
    now = int(time.time())
    told = {"iss": issuer.url, "aud": "llmops", "sub": "u-1", "email": "ann@acme", "tenant": "acme", "exp": now + 600}
    return jwt.PyJWS().encode(json.dumps({**told, **claims}).encode(), issuer.private["ec"], "ES256", {"kid": "ec"})


# -- claims ------------------------------------------------------------------------------------------------------------

_ODD = (None, [], {}, "", "x", True, 1.5, -1, 0, 10**400, *map(float, ("inf", "nan")), "\ud800", "a\0b", "\x1b[2J")
_ODD += ("x" * 9000,)
_values = st.recursive(
    st.one_of(st.sampled_from(_ODD), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
_claims = st.dictionaries(
    st.sampled_from(["exp", "nbf", "iat", "iss", "aud", "sub", "email", "email_verified", "tenant", "scope", "jti"]),
    _values, max_size=3,
)  # fmt: skip


async def test_signed_claims_of_any_form_are_a_caller_or_a_refusal(issuer):
    """Before the fix, `exp` of 10**400 and halves of surrogate pairs gave a 500 and a traceback."""
    drawn: list[dict] = [{name: odd} for name in ("exp", "nbf", "iat", "sub", "email", "tenant") for odd in _ODD]

    @settings(max_examples=scaled(60, 5000), database=None)
    @given(_claims)
    def collect(claims: dict) -> None:
        drawn.append(claims)

    collect()
    async with tokens_at(issuer) as tokens:
        assert {"caller", "refused"} == {await outcome(tokens, signed(issuer, claims)) for claims in drawn}
        for end in (float("nan"), float("inf"), 10**400):
            token = signed(issuer, {"exp": end})
            if await outcome(tokens, token) == "caller":
                assert (await tokens.find(token)).until < 8e9


async def test_headers_of_any_form_are_refused(issuer):
    def token(header: str) -> str:
        part = jwt.utils.base64url_encode(header.encode("utf-8", "surrogatepass")).decode()
        return f"{part}.e30.e30"

    headers = [json.dumps({"alg": "RS256", "kid": odd}) for odd in _ODD]
    headers += ["[" * 9000, '{"a":' * 2000, "null", "3", '"x"']
    headers += ['{"alg":["RS256"]}', '{"alg":{}}', '{"alg":"RS256","crit":["x"]}']
    async with tokens_at(issuer) as tokens:
        await tokens.find(issuer.token())
        made = [token(header) for header in headers]
        assert set(await asyncio.gather(*(outcome(tokens, one) for one in made if tokens.takes(one)))) == {"refused"}


async def test_an_address_that_is_not_verified_or_of_another_account_is_not_that_person(issuer, store, url):
    await create_tenants(store, "acme")
    async with tokens_at(issuer, KeyDirectory(url)) as tokens:
        for unverified in (False, "false", None, 0, "no"):
            token = issuer.token(sub="mallory", email="ann@acme.example", email_verified=unverified)
            with pytest.raises(InvalidKeyError, match="is not verified"):
                await tokens.find(token)
        for email in (None, ["eve@acme.example"], "eve@acme.example"):
            with pytest.raises(InvalidKeyError, match="is not verified"):
                await tokens.find(issuer.token(sub="eve@acme.example", email=email, email_verified=False))
        ann = await tokens.find(issuer.token(sub="ann", email="ann@acme.example", email_verified=True))
        # the same address, verified for another account later on
        with pytest.raises(InvalidKeyError, match="cannot be a member of its tenant"):
            await tokens.find(issuer.token(sub="mallory", email="ann@acme.example", email_verified=True))
        # and the same account with another address
        moved = await tokens.find(issuer.token(sub="ann", email="ann@new.example", email_verified=True))
        assert moved.user_id == ann.user_id


@pytest.mark.parametrize(
    ("path", "claims"),
    [
        ("profile.email", {"profile": {"email": "ann@acme.example", "email_verified": False}}),
        ("https://x/email", {"https://x/email": "ann@acme.example", "https://x/email_verified": "false"}),
        ("phone_number", {"phone_number": "+1555", "phone_number_verified": False}),
    ],
)
async def test_an_address_in_any_claim_must_be_verified(issuer, path, claims):
    """Before the fix, only the claim `email` was checked."""
    async with tokens_at(issuer, claims={"tenant": "tenant", "user": path}) as tokens:
        with pytest.raises(InvalidKeyError, match="is not verified"):
            await tokens.find(issuer.token(sub="mallory", **claims))


async def test_a_token_without_a_subject_is_nobodys(issuer):
    """Before the fix, all users of an issuer that leaves `sub` empty were one user."""
    async with tokens_at(issuer) as tokens:
        with pytest.raises(InvalidKeyError):
            await tokens.find(issuer.token(sub="", email="ann@acme.example", email_verified=True))


async def test_a_store_that_cannot_be_opened_refuses_no_token(issuer, tmp_path):
    """A wrong file or password is the operator's mistake: 503, and not 401 for every user."""
    (tmp_path / "not.db").write_bytes(b"no database" * 200)
    async with tokens_at(issuer, KeyDirectory(f"sqlite:///{tmp_path}/not.db")) as tokens:
        with pytest.raises(UnavailableError):
            await tokens.find(issuer.token(sub="ann", email="ann@acme.example", email_verified=True))


# -- one caller's bad data ---------------------------------------------------------------------------------------------


async def test_a_token_that_no_database_takes_is_no_outage_for_others(issuer, store, url, monkeypatch):
    """Before the fix, other users' new tokens got 503 in 60 of 60 requests.

    A deleted tenant's token worked for 69 s.
    """
    await create_tenants(store, "acme", "gone")
    find = keys.find_user_by_identity

    async def fails(connection, issuer, subject):
        if subject == "unforeseen":
            raise DBAPIError("SELECT", {}, RuntimeError("of this value alone"))
        return await find(connection, issuer, subject)

    monkeypatch.setattr(keys, "find_user_by_identity", fails)
    async with tokens_at(issuer, KeyDirectory(url)) as tokens:
        cached = CachedDirectory(tokens, fresh=0.2)
        gone = issuer.token(sub="gone", email="g@gone.example", tenant="gone")
        await cached.find(gone)
        async with store.write() as connection:
            await delete_tenant(connection, "gone", BY)
        others = [issuer.token("ec", "ES256", sub=f"u{n}", email=f"u{n}@acme.example") for n in range(OTHERS)]
        hostile = [issuer.token(sub=f"h{n}", email=email) for n, email in enumerate(("a\0b@x", "\ud800@x", "a\x1b@x"))]
        hostile.append(issuer.token(sub="unforeseen", email="x@acme.example"))
        outcomes = []
        for other in others:
            outcomes += [await outcome(cached, one) for one in hostile]
            assert await outcome(cached, other) == "caller"
        assert set(outcomes) == {"refused", "undecided"}
        while await outcome(cached, gone) == "caller":
            await asyncio.sleep(0.05)
        assert await outcome(cached, gone) == "refused"


async def test_running_answers_of_a_deleted_tenants_tokens_end(issuer, store, url):
    """Before the fix, requests with tokens were not watched. A key replaced twice is not in the store."""
    await create_tenants(store, "gone")
    secret, key_id, _ = await add_key(store, "acme")
    directory = KeyDirectory(url)
    async with tokens_at(issuer, directory) as tokens:
        gone = await tokens.find(issuer.token(sub="gone", email="g@gone.example", tenant="gone"))
        callers = {gone, await tokens.find(issuer.token()), await directory.find(secret)}
        assert await directory.ended(callers) == set()
        async with store.write() as connection:
            await delete_tenant(connection, "gone", BY)
            key = await require_key(connection, key_id)
            for _ in range(2):
                newest = await rotate_key(connection, key, timedelta(0), BY)
        callers.add(await directory.find(newest))
        replaced = {one for one in callers if one.secret_hash == hash_secret(secret)}
        assert await directory.ended(callers) == {gone} | replaced


@pytest.mark.parametrize("other", ["\u212aate", "\u212bsa", "\u2126mar", "\u03f4eo"])
async def test_an_address_that_folds_to_another_is_refused(issuer, store, url, other):
    """Before the fix, who had the address with a Kelvin or Ohm sign was the user with the letter."""
    await add_key(store, "acme", f"{other.lower()}@acme.example")
    async with tokens_at(issuer, KeyDirectory(url)) as tokens:
        assert await outcome(tokens, issuer.token(sub="other", email=f"{other}@acme.example")) == "refused"


@pytest.mark.parametrize("claim", ["preferred_username", "sub"])
async def test_a_name_that_its_user_chose_is_not_the_user_of_a_key(issuer, store, url, claim):
    """Before the fix, whose `preferred_username` was a colleague's address was that colleague."""
    await add_key(store, "acme", "ann@acme.example")
    ann = {"sub": "ann@acme.example" if claim == "sub" else "eve", claim: "ann@acme.example"}
    async with tokens_at(issuer, KeyDirectory(url), claims={"user": claim}) as tokens:
        for email in ({}, {"email": "eve@evil.example"}, {"email": "ann@acme.example", "email_verified": False}):
            assert await outcome(tokens, issuer.token(**ann, **email)) == "refused"
        known = await tokens.find(issuer.token(**ann, email="Ann@acme.example"))
        # a name without an account is a new user, also at the second token
        bob = {"sub": "bob@x" if claim == "sub" else "bob", claim: "bob@x"}
        new = [await tokens.find(issuer.token(**bob, without=["email"])) for _ in range(2)]
        assert new[0].user_id == new[1].user_id != known.user_id
        # before the fix, that user became the user of the first key for the address
        _, _, later = await add_key(store, "acme", "bob@x")
        new.append(await tokens.find(issuer.token(**bob, without=["email"], jti="3")))
        assert new[2].user_id == new[0].user_id != later


async def test_one_subject_with_many_addresses_is_bound_once_in_the_audit(store, url):
    """Before the fix, the audit named up to three users of one subject."""
    await create_tenants(store, "acme")
    directory = KeyDirectory(url)
    asked = [directory.member("acme", f"u{one}@x", Identity("https://i", "s"), frozenset(), 0.0) for one in range(5)]
    await asyncio.gather(*asked)
    await directory.close()
    async with store.read() as connection:
        assert len(await list_audit_entries(connection, limit=9, action="user.bind")) == 1


async def test_two_subjects_with_one_address_are_not_one_user(store, url):
    """Before the fix, PostgreSQL bound both of them to the user in 19 of 20 tries."""
    directory = KeyDirectory(url)
    for number in range(10):
        await add_key(store, "acme", f"u{number}@acme.example")
        subjects = [Identity("https://i", f"{letter}{number}") for letter in "ab"]
        asked = [directory.member("acme", f"u{number}@acme.example", one, frozenset(), 0.0) for one in subjects]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} == {InvalidKeyError, Caller}
    await directory.close()


async def test_a_user_with_many_tokens_holds_up_no_other(issuer, store, url):
    """Before the fix, 1,500 tokens of one user at once had others' new tokens get 503 for seconds."""
    statements = []
    await create_tenants(store, "acme")
    async with tokens_at(issuer, KeyDirectory(url)) as tokens:
        crowd = [issuer.token("ec", "ES256", email="ann@acme.example", jti=str(number)) for number in range(50)]
        listen(Engine, "before_cursor_execute", note := lambda *given: statements.append(given[2]))
        assert {await one for one in asyncio.as_completed([outcome(tokens, one) for one in crowd])} == {"caller"}
        remove(Engine, "before_cursor_execute", note)
    assert len([one for one in statements if "FROM tenants" in one]) < 5


async def test_made_up_keys_do_not_hold_up_the_tokens_of_a_new_key(issuer):
    """Before the fix, good tokens of the new key got 401 for 30.5 s."""
    issuer.published = ["rsa"]
    async with tokens_at(issuer) as tokens:
        cached = CachedDirectory(tokens)
        assert await outcome(cached, issuer.token("rsa")) == "caller"

        async def stranger() -> None:
            for number in range(1000):
                token = issuer.token("stranger", headers={"kid": f"made-up-{number}"})
                await asyncio.gather(outcome(cached, token), asyncio.sleep(0.1))

        attack = asyncio.create_task(stranger())
        try:
            await asyncio.sleep(0.3)
            begun = time.monotonic()
            issuer.published = ["rsa", "ec"]
            assert await outcome(cached, issuer.token("ec", "ES256")) == "caller"
            assert time.monotonic() - begun < 2 * MIN_REFRESH_INTERVAL + 2
        finally:
            attack.cancel()
            await asyncio.gather(attack, return_exceptions=True)
            issuer.published = ["rsa", "ec"]


@pytest.mark.parametrize("known", [True, False])
async def test_made_up_keys_do_not_use_up_an_issuer_that_limits_readings(issuer, monkeypatch, known):
    """Before the fix, an issuer that also counts what it refuses was asked every 2 s, and answered 429 for good."""
    monkeypatch.setattr(jwks_module, "MIN_REFRESH_INTERVAL", 0.05)
    asked: list[float] = []

    def limited(_) -> Page:
        asked.append(now := time.monotonic())
        few = sum(at > now - 1 for at in asked) <= 5 and (known or len(asked) > 3)
        return Page(json.dumps(issuer.answer("/keys")), 200 if few else 429)

    with PageServer(limited) as server:
        async with tokens_at(issuer, jwks=f"{server.url}/keys") as tokens:
            assert await outcome(tokens, issuer.token()) == ("caller" if known else "undecided")
            end = time.monotonic() + 2
            while time.monotonic() < end:
                token = issuer.token("stranger", headers={"kid": str(time.monotonic())})
                await asyncio.gather(outcome(tokens, token), asyncio.sleep(0.01))
            assert len(asked) < 20
            while await outcome(tokens, issuer.token("stranger", headers={"kid": "x"})) == "undecided":
                assert time.monotonic() < end + 3


def cache_before(answer, monkeypatch, refresh: float) -> JwksCache:
    """Return a cache before an issuer whose statuses and key ids `answer` returns, in virtual time."""

    def respond(_) -> httpx.Response:
        status, kids = answer()
        body = json.dumps({"keys": [public | {"kid": kid} for kid in kids]}).encode()
        return httpx.Response(status, stream=httpx.ByteStream(body))

    public = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048).public_key(), as_dict=True)
    client = httpx.AsyncClient(transport=httpx.MockTransport(respond))
    monkeypatch.setattr(jwks_module, "fair_client", lambda **_: client)
    issuer = "https://issuer.example"
    return JwksCache(issuer, f"{issuer}/keys", refresh, asyncio.get_running_loop().time)


@pytest.mark.parametrize(("allowance", "longest"), [(6, 80), (60, 62)])
def test_a_flood_of_made_up_keys_hardly_delays_the_end_of_a_removed_key(monkeypatch, allowance, longest):
    """Strangers' fetches use up the allowance of a minute, which the shortest `refresh` outlasts."""
    fetched: list[float] = []

    async def flood() -> None:
        clock = asyncio.get_running_loop().time

        def answer() -> tuple[int, list[str]]:
            if sum(at > clock() - 60 for at in fetched) >= allowance:
                return 429, []
            fetched.append(clock())
            return 200, ["known"]

        cache, made_up = cache_before(answer, monkeypatch, 60), []
        while clock() < 300:
            assert await cache.find("known", "RS256")
            made_up.append(asyncio.create_task(cache.find(str(clock()), "RS256")))
            await asyncio.sleep(0.1)
        await asyncio.gather(*made_up, return_exceptions=True)
        await cache.close()

    run_in_virtual_time(flood())
    assert max(later - earlier for earlier, later in pairwise(fetched)) < longest


def test_gateways_that_share_an_issuer_with_an_allowance_take_turns(monkeypatch):
    """Strangers flood three gateways. Before the fix, the gateways that had fetched used up the allowance."""
    fetched: list[float] = [float("-inf")]

    async def flood_one(start: float, latest: list[float]) -> None:
        await asyncio.sleep(start)
        clock = asyncio.get_running_loop().time

        def answer() -> tuple[int, list[str]]:
            if clock() < fetched[-1] + 10:
                return 429, []
            fetched.append(clock())
            latest.append(clock())
            return 200, ["known"]

        cache, made_up = cache_before(answer, monkeypatch, 60), []
        while clock() < 1000:
            made_up.append(asyncio.create_task(cache.find(str(clock()), "RS256")))
            await asyncio.sleep(0.1)
        await asyncio.gather(*made_up, return_exceptions=True)
        await cache.close()

    async def flood_all() -> None:
        await asyncio.gather(*map(flood_one, (0, 0.7, 1.3), successes))

    random.seed(1)
    successes: list[list[float]] = [[], [], []]
    run_in_virtual_time(flood_all())
    assert max(later - earlier for latest in successes for earlier, later in pairwise([0, *latest, 1000])) < 70


@pytest.mark.parametrize(
    ("refresh", "flooded", "longest"),
    [(60, False, MIN_REFRESH_INTERVAL), (300, True, MIN_REFRESH_INTERVAL)],
)
def test_a_token_of_a_new_key_waits_at_most_for_the_next_fetch(monkeypatch, refresh, flooded, longest):
    async def rotations() -> None:
        clock, published, made_up = asyncio.get_running_loop().time, ["known"], []
        cache = cache_before(lambda: (200, published), monkeypatch, refresh)
        assert await cache.find("known", "RS256")
        while clock() < 500:
            for number in range(1000 if flooded else 0):
                made_up.append(asyncio.create_task(cache.find(f"{clock()}-{number}", "RS256")))
                await asyncio.sleep(0.1)
            await asyncio.sleep(0 if flooded else 100)
            published.append(f"new-{clock()}")
            begun = clock()
            assert await cache.find(published[-1], "RS256")
            assert clock() - begun <= longest
        assert set(await asyncio.gather(*made_up)) <= {None}
        await cache.close()

    run_in_virtual_time(rotations())


@pytest.mark.parametrize("early", [False, True])
def test_keys_that_the_servers_of_an_issuer_publish_by_turns_are_known_together(monkeypatch, early):
    """Before the fix, 118 of 400 tokens were refused. A removed key counts for `refresh`, as before."""
    refresh, removed_at = 300, 2000

    async def tokens() -> None:
        clock, chosen = asyncio.get_running_loop().time, random.Random(2)
        cache = cache_before(lambda: (200, chosen.choice("AB" if clock() < removed_at else "B")), monkeypatch, refresh)
        known = []
        while clock() < removed_at:
            known.append(await cache.find(chosen.choice("AB"), "RS256") is not None)
            await asyncio.sleep(5)
        begun = clock()
        while await cache.find("A", "RS256"):
            if early:
                assert await cache.find(str(clock()), "RS256") is None
            await asyncio.sleep(1)
        assert clock() - begun <= refresh + MIN_REFRESH_INTERVAL
        await cache.close()
        assert known.count(False) < len(known) / 20

    run_in_virtual_time(tokens())


async def test_tokens_wait_for_the_reading_after_a_429(issuer, monkeypatch):
    """Before the fix, all tokens but the one that began the reading got 503, although it brought the keys."""
    monkeypatch.setattr(jwks_module, "MIN_REFRESH_INTERVAL", 0.2)
    asked: list[None] = []

    def limited(_) -> Page:
        asked.append(None)
        time.sleep(0.3 * (len(asked) > 1))
        return Page(json.dumps(issuer.answer("/keys")), 200 if len(asked) > 1 else 429)

    with PageServer(limited) as server:
        async with tokens_at(issuer, jwks=f"{server.url}/keys") as tokens:
            assert await outcome(tokens, issuer.token()) == "undecided"
            await asyncio.sleep(0.5)
            first = asyncio.create_task(outcome(tokens, issuer.token()))
            await asyncio.sleep(0.1)
            assert [await outcome(tokens, issuer.token()), await first, len(asked)] == ["caller", "caller", 2]


async def test_a_reading_that_began_before_the_token_came_refuses_nothing(issuer, monkeypatch):
    """Before the fix, a good token of a new key got 401 for 30 s if a made-up key had begun a slow reading."""
    issuer.published = ["rsa"]
    published, begun = issuer.answer, threading.Event()

    def slowly(path: str) -> dict:
        keys = published(path)
        if path.endswith("keys") and begun.is_set():
            time.sleep(0.3)
        return keys

    async with tokens_at(issuer) as tokens:
        cached = CachedDirectory(tokens)
        assert await outcome(cached, issuer.token()) == "caller"
        monkeypatch.setattr(jwks_module, "MIN_REFRESH_INTERVAL", 0.1)
        monkeypatch.setattr(issuer, "answer", slowly)
        begun.set()
        await asyncio.sleep(0.1)
        made_up = asyncio.create_task(outcome(cached, issuer.token("stranger", headers={"kid": "made-up"})))
        await asyncio.sleep(0.1)
        issuer.published = ["rsa", "ec"]
        assert (await outcome(cached, issuer.token("ec", "ES256")), await made_up) == ("caller", "refused")


async def test_a_crowd_of_made_up_keys_is_bounded_and_its_refusal_is_not_remembered(issuer, monkeypatch):
    monkeypatch.setattr(jwks_module, "MAX_WAITING", 20)
    asked = issuer.asked
    async with tokens_at(issuer) as tokens:
        cached = CachedDirectory(tokens)
        assert await outcome(cached, issuer.token()) == "caller"
        crowd = [issuer.token("stranger", headers={"kid": f"crowd-{n}"}) for n in range(60)]
        found = await asyncio.gather(*(outcome(cached, one) for one in crowd))
        assert (found.count("refused"), found.count("undecided"), issuer.asked - asked) == (20, 40, 2)
        late = [one for one, was in zip(crowd, found, strict=True) if was == "undecided"]
        assert await outcome(cached, late[0]) == "refused"
        # a known key is not held up by those that wait
        assert await outcome(cached, issuer.token("ec", "ES256")) == "caller"


async def test_an_empty_key_set_takes_no_known_key_away(issuer, monkeypatch):
    """Before the fix, made-up keys had the empty set read at once, and all good tokens got 401.

    A set without a key for signatures was no better.
    """
    async with tokens_at(issuer) as tokens:
        assert await outcome(tokens, issuer.token()) == "caller"
        monkeypatch.setattr(jwks_module, "MIN_REFRESH_INTERVAL", 0.1)
        for number, empty in enumerate(([], [issuer.public("rsa", use="enc")])):
            monkeypatch.setattr(issuer, "answer", lambda _, empty=empty: {"keys": empty})
            tokens._jwks._url = f"{issuer.url}/keys"
            await outcome(tokens, issuer.token("stranger", headers={"kid": f"made-up-{number}"}))
            assert await outcome(tokens, issuer.token()) == "caller"


# -- key sets ----------------------------------------------------------------------------------------------------------


_ODD_KEYS = [*_ODD[:9], {"kty": []}, {"kty": "RSA", "n": 5}, {"kty": "RSA", "kid": {}}]
_HOSTILE_SETS = {
    "a gzip bomb": gzip.compress(b'{"keys":[' + b" " * scaled(64, 700) * MIB, 1),
    "100,000 lists": b'{"keys":' + b"[" * 100_000,
    "too large": b'{"keys":[' + b" " * (2 * MIB),
    "no object": b"[]",
    "no text": b"\xff\xfe",
    "odd keys": json.dumps({"keys": _ODD_KEYS}).encode(),
    "a long modulus": json.dumps({"keys": [{"kty": "RSA", "kid": "rsa", "n": "a" * 500_000, "e": "AQAB"}]}).encode(),
}


@pytest.mark.parametrize("name", _HOSTILE_SETS)
async def test_hostile_key_sets_are_no_keys(issuer, name):
    """Before the fix, each 64 KiB of a bomb were unpacked to 64 MiB, and deep lists were a 500."""
    headers = {"content-encoding": "gzip"} if name == "a gzip bomb" else {}
    with PageServer(lambda _: Page(_HOSTILE_SETS[name], headers=headers)) as server:
        async with tokens_at(issuer, jwks=f"{server.url}/keys") as tokens:
            token = issuer.token()
            tracemalloc.start()
            try:
                assert await outcome(tokens, token) in ("refused", "undecided"), name
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 16 * MIB
            # nothing of it stays in the way: the same directory works with keys that are read later
            tokens._jwks._url = f"{issuer.url}/keys"
            tokens._jwks._tried_at = float("-inf")
            assert await outcome(tokens, token) == "caller"


async def test_private_parts_of_a_published_key_are_not_read():
    """An issuer may publish its whole key by mistake; before the fix, checking it took 0.4 s for each token."""
    private = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048), as_dict=True) | {"kid": "k"}
    del private["key_ops"]
    with PageServer(lambda _: Page(json.dumps({"keys": [private]}))) as server:
        cache = JwksCache("https://issuer.example", f"{server.url}/keys", 300)
        try:
            assert isinstance(await cache.find("k", "RS256"), rsa.RSAPublicKey)
        finally:
            await cache.close()
