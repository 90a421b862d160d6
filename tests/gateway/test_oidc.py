"""Tokens of an identity provider: a real one on a port of its own, with real keys, which rotates them and goes away."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from llmops.gateway.auth.authentication import keys_required
from llmops.gateway.auth.credential_cache import CachedDirectory
from llmops.gateway.auth.jwks import MIN_REFRESH_INTERVAL, JwksCache
from llmops.gateway.auth.oidc import OidcDirectory
from llmops.gateway.errors import InvalidKeyError, UnavailableError
from llmops.gateway.settings import GatewaySettings, OidcSettings
from llmops.store.accounts.limits import Limits
from llmops.store.accounts.tenants import create_tenant, delete_tenant
from llmops.store.accounts.users import find_user
from llmops.store.audit import AuditContext
from llmops.store.factory import open_store
from tests.gateway.test_access import asking, bearer
from tests.gateway.test_key_cache import ANN
from tests.support.accounts import add_key
from tests.support.pages import Page, PageServer
from tests.support.waiting import Clock

AUDIENCE = "llmops"


def public_jwk(private: PrivateKeyTypes) -> dict:
    key = private.public_key()
    kinds = {rsa.RSAPublicKey: RSAAlgorithm, ec.EllipticCurvePublicKey: ECAlgorithm}
    kind = next((kind for one, kind in kinds.items() if isinstance(key, one)), OKPAlgorithm)
    return kind.to_jwk(key, as_dict=True)


class Issuer:
    """Publishes `keys`, and counts how often it is asked for them."""

    def __init__(self) -> None:
        self.private = {
            "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
            "stranger": rsa.generate_private_key(public_exponent=65537, key_size=2048),
        }
        self.published = ["rsa", "ec"]
        self.asked = 0
        self.status = 200
        self.document: dict = {}
        self.server = PageServer(lambda request: Page(json.dumps(self.answer(request.path)), self.status))
        self.url = self.server.url

    def answer(self, path: str) -> dict:
        if path.endswith("openid-configuration"):
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.document}
        self.asked += 1
        return {"keys": [self.public(name) for name in self.published]}

    def public(self, name: str, **fields) -> dict:
        return {**public_jwk(self.private[name]), "kid": name, "use": "sig", **fields}

    def pem(self, name: str) -> bytes:
        pem, info = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return self.private[name].public_key().public_bytes(pem, info)

    def token(self, name="rsa", algorithm="RS256", key=None, headers=None, without=(), **claims) -> str:
        now = int(time.time())
        told = {"iss": self.url, "aud": AUDIENCE, "sub": "u-1", "email": "ann@acme", "tenant": "acme"}
        told |= {"iat": now, "nbf": now, "exp": now + 600} | claims
        told = {name: value for name, value in told.items() if name not in without}
        key = None if algorithm == "none" else key or self.private[name]
        return jwt.encode(told, key, algorithm, {"kid": name, **(headers or {})})

    def settings(self, **settings) -> OidcSettings:
        return OidcSettings(issuer=self.url, audience=AUDIENCE, **settings)


@pytest.fixture(scope="module")
def provider():
    issuer = Issuer()
    yield issuer
    issuer.server.server_close()


@pytest.fixture
def issuer(provider):
    provider.published, provider.asked, provider.status, provider.document = ["rsa", "ec"], 0, 200, {}
    return provider


@asynccontextmanager
async def tokens_of(issuer: Issuer, clock=time.monotonic, members=None, **settings):
    given = issuer.settings(**settings)
    tokens = OidcDirectory(given, members, JwksCache(given.issuer, given.jwks, given.refresh, clock))
    try:
        yield tokens
    finally:
        await tokens.close()


async def refusal(tokens: OidcDirectory, token: str) -> str:
    with pytest.raises(InvalidKeyError) as refused:
        await tokens.find(token)
    return refused.value.message


# -- what is a token -------------------------------------------------------------------------------------------------


async def test_a_token_says_whose_it_is(issuer):
    claims = {"exp": 2_000_000_000, "scope": "openid llmops:usage llmops:unknown inference"}
    async with tokens_of(issuer) as tokens:
        for name, algorithm in (("rsa", "RS256"), ("rsa", "PS256"), ("ec", "ES256")):
            token = issuer.token(name, algorithm, **claims)
            assert tokens.takes(token)
            caller = await tokens.find(token)
            assert (caller.tenant_id, caller.scopes, caller.until) == ("acme", {"usage"}, 2_000_000_000 + 30)
            assert caller.share == f"acme/{caller.user_id}"


async def test_tenants_whose_names_have_slashes_share_no_cache_no_queue_and_no_user(issuer):
    """Before, what stands before the first slash was the tenant: nothing of Keycloak's groups `/acme` and `/evil`.

    A person's tokens for another tenant of the issuer also read what the person had stored in the first.
    """
    async with tokens_of(issuer) as tokens:
        names = ["acme", "acme/a", "acme/b", "acme%2Fa", "/acme", "/evil"]
        callers = [await tokens.find(issuer.token(tenant=name)) for name in names]
    assert [caller.tenant_id for caller in callers] == names
    assert len({caller.share.partition("/")[0] for caller in callers}) == len(names)
    assert len({caller.owner for caller in callers}) == len(names)


WRONG = "This token is malformed, or its issuer did not sign it; get a new one."
ALGORITHMS = "RS256, PS256, ES256, EdDSA"
OTHER = f"This gateway accepts tokens signed with {ALGORITHMS}; this token is signed with another algorithm."
EARLY = "This token is not valid yet; try again later."
FOREIGN = "This token is not for this gateway; get one with exp and sub, and with this gateway's iss and aud."
NO_TENANT = "This token has no claim 'tenant', which names its tenant; ask the operator to add the claim."

BAD = {
    "unsigned": (lambda one: one.token(algorithm="none"), OTHER),
    "signed with the public key as a secret": (lambda one: forged(one), OTHER),
    "another key under the same id": (lambda one: one.token(key=one.private["stranger"]), WRONG),
    "the algorithm of another kind of key": (lambda one: one.token("rsa", "ES256", one.private["ec"]), WRONG),
    "a key that it brings itself": (lambda one: strange(one, jwk=one.public("stranger"), kid="stranger"), WRONG),
    "an address of keys that it brings": (lambda one: strange(one, jku="http://127.0.0.1:1/keys", kid="x"), WRONG),
    "an extension that must be understood": (lambda one: one.token(headers={"crit": ["b65"], "b65": True}), WRONG),
    "another signature": (lambda one: one.token()[:-8] + "AAAAAAAA", WRONG),
    "other claims": (lambda one: swapped(one), WRONG),
    "expired": (lambda one: one.token(exp=int(time.time()) - 60), "This token has expired; use another."),
    "not yet valid": (lambda one: one.token(nbf=int(time.time()) + 600), EARLY),
    "issued in the future": (lambda one: one.token(iat=int(time.time()) + 600), EARLY),
    "for another audience": (lambda one: one.token(aud="billing"), FOREIGN),
    "of another issuer": (lambda one: one.token(iss="https://other.example"), FOREIGN),
    "without an end": (lambda one: one.token(without=("exp",)), FOREIGN),
    "without a subject": (lambda one: one.token(without=("sub",)), FOREIGN),
    "without an audience": (lambda one: one.token(without=("aud",)), FOREIGN),
    "without a tenant": (lambda one: one.token(without=("tenant",)), NO_TENANT),
    "no JSON": (lambda one: "bm90IGpzb24.e30.AAAA", WRONG),
    "no base64": (lambda one: "a.b.c", WRONG),
}


def strange(issuer: Issuer, **headers: object) -> str:
    """Return a token that a stranger signed, with headers that lead to the stranger's key."""
    return issuer.token(key=issuer.private["stranger"], headers=headers)


def forged(issuer: Issuer) -> str:
    """HS256, with what everybody can read; the library itself refuses to make it."""
    _, claims, _ = issuer.token().split(".")
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"rsa"}').rstrip(b"=").decode()
    mac = hmac.new(issuer.pem("rsa"), f"{header}.{claims}".encode(), hashlib.sha256).digest()
    return f"{header}.{claims}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def swapped(issuer: Issuer) -> str:
    header, _, signature = issuer.token().split(".")
    return f"{header}.{issuer.token(tenant='zeta').split('.')[1]}.{signature}"


async def test_what_is_no_token_is_told_in_one_sentence(issuer):
    async with tokens_of(issuer) as tokens:
        await tokens.find(issuer.token())
        told = {case: await refusal(tokens, make(issuer)) for case, (make, _) in BAD.items()}
    assert told == {case: why for case, (_, why) in BAD.items()}


async def test_clocks_may_differ_a_little(issuer):
    now = int(time.time())
    async with tokens_of(issuer) as tokens:
        assert await tokens.find(issuer.token(nbf=now + 10, iat=now + 10))
        assert (await tokens.find(issuer.token(exp=now - 5))).until == now + 25


async def test_a_token_sent_too_early_is_taken_as_soon_as_it_is_valid(issuer):
    begins = int(time.time()) + 1
    async with tokens_of(issuer, leeway=0) as tokens:
        cached = CachedDirectory(tokens)
        with pytest.raises(InvalidKeyError, match="not valid yet"):
            await cached.find(token := issuer.token(nbf=begins))
        await asyncio.sleep(begins + 0.01 - time.time())
        assert await cached.find(token)


async def test_claims_may_have_other_names_and_be_within_others(issuer):
    claims = {"tenant": "org.name", "user": "preferred", "scopes": "realm.roles"}
    own = {"org": {"name": "zeta"}, "preferred": "zoe@z", "realm": {"roles": ["llm-admin", 7]}}
    token = issuer.token(without=("tenant", "email"), **own)
    async with tokens_of(issuer, claims=claims, scope_prefix="llm-", scopes=["metrics"]) as tokens:
        caller = await tokens.find(token)
        assert (caller.tenant_id, caller.scopes) == ("zeta", {"admin"})
        assert (await tokens.find(issuer.token(without=("tenant",), org={"name": "zeta"}))).scopes == {"metrics"}
        # a name with dots of its own, as namespaced claims have
    async with tokens_of(issuer, claims={"tenant": "https://acme.example/tenant"}) as tokens:
        assert (await tokens.find(issuer.token(**{"https://acme.example/tenant": "x"}))).tenant_id == "x"
    async with tokens_of(issuer, tenant="everyone") as tokens:
        assert (await tokens.find(issuer.token(without=("tenant",)))).tenant_id == "everyone"
        # Before the fix, users of all tenants were users of this one.
        assert (await tokens.find(issuer.token())).tenant_id == "acme"
        assert await refusal(tokens, issuer.token(tenant=["acme"])) == NO_TENANT


# -- keys that change, and go away -----------------------------------------------------------------------------------


async def test_a_new_key_is_taken_at_once_and_an_old_one_is_not_for_long(issuer):
    clock = Clock()
    async with tokens_of(issuer, clock, refresh="5m") as tokens:
        await tokens.find(issuer.token("rsa"))
        issuer.published = ["ec"]
        clock.now += MIN_REFRESH_INTERVAL
        # read again, because the key is not known
        issuer.published.append("stranger")
        assert await tokens.find(issuer.token("stranger"))
        assert await tokens.find(issuer.token("rsa"))
        clock.now += 300 - MIN_REFRESH_INTERVAL
        assert await tokens.find(issuer.token("stranger"))
        assert (issuer.asked, await refusal(tokens, issuer.token("rsa"))) == (2, WRONG)


class Members:
    """The users of a store, which can be `away`."""

    away = True

    async def member(self, *_, **__):
        if self.away:
            raise UnavailableError("away", detail="gone")
        return ANN


async def test_tokens_of_unknown_keys_do_not_decide_when_a_store_that_is_away_is_asked_again(issuer):
    """Before the fix, each took a turn, and a caller's token waited although the store was back."""
    members, clock = Members(), Clock()
    async with tokens_of(issuer, members=members) as tokens:
        cached = CachedDirectory(tokens, clock=clock)
        with pytest.raises(UnavailableError):
            await cached.find(issuer.token())
        members.away = False
        clock.now += 1
        made_up = [asyncio.create_task(cached.find(issuer.token(headers={"kid": f"no-{at}"}))) for at in range(3)]
        await asyncio.sleep(0.01)
        assert await cached.find(issuer.token()) == ANN
        assert {type(error) for error in await asyncio.gather(*made_up, return_exceptions=True)} == {InvalidKeyError}


async def test_an_issuer_that_is_away_leaves_its_keys(issuer, caplog):
    clock = Clock()
    async with tokens_of(issuer, clock, refresh="1m") as tokens:
        await tokens.find(issuer.token())
        issuer.status = 500
        for clock.now in (100, 1000, 10_000):
            assert await tokens.find(issuer.token())
            if tokens._jwks._reading:
                await tokens._jwks._reading
        assert (issuer.asked, caplog.text.count("the keys that were read last are used")) == (1, 1)
        issuer.status = 200
        clock.now += MIN_REFRESH_INTERVAL
        await tokens.find(issuer.token())
        await tokens._jwks._reading
        assert "can be read again" in caplog.text
        assert issuer.asked == 2


async def test_without_any_keys_nobody_can_say(issuer, caplog):
    async with tokens_of(issuer, clock := Clock()) as tokens:
        for wrong in ({"issuer": "https://other.example"}, {"jwks_uri": "http://keys.example/keys"}):
            issuer.document = wrong
            clock.now += MIN_REFRESH_INTERVAL
            with pytest.raises(UnavailableError) as refused:
                await tokens.find(issuer.token())
            assert (refused.value.status, refused.value.code) == (503, "keys_unavailable")
        assert "its discovery document names another issuer, 'https://other.example'" in caplog.text
        issuer.document = {}
        assert await tokens.find(issuer.token())


async def test_keys_that_are_not_for_signatures_are_none(issuer, monkeypatch):
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"}
    odd = [secret, issuer.public("rsa", use="enc"), "no key", issuer.public("ec", alg="ES256")]
    monkeypatch.setattr(issuer, "answer", lambda path: {"keys": odd})
    async with tokens_of(issuer, jwks=f"{issuer.url}/keys", algorithms=["RS256", "ES256"]) as tokens:
        assert await tokens.find(issuer.token("ec", "ES256"))
        assert await refusal(tokens, issuer.token("rsa")) == WRONG
        # the only key that there is needs no name
        claims = jwt.decode(issuer.token(), options={"verify_signature": False})
        assert await tokens.find(jwt.encode(claims, issuer.private["ec"], "ES256"))


async def test_keys_of_two_types_may_share_an_id(issuer, monkeypatch):
    """Before the fix, only the key that was listed last existed, so the tokens of the other were refused."""
    both = [issuer.public("rsa", kid="k"), issuer.public("ec", kid="k")]
    async with tokens_of(issuer, jwks=f"{issuer.url}/keys") as tokens:
        for keys in (both, both[::-1]):
            monkeypatch.setattr(issuer, "answer", lambda path, keys=keys: {"keys": keys})
            assert await tokens.find(issuer.token("rsa", headers={"kid": "k"}))
            assert await tokens.find(issuer.token("ec", "ES256", headers={"kid": "k"}))


# -- at the gateway --------------------------------------------------------------------------------------------------


async def test_tokens_beside_keys_with_tenants_of_the_store(issuer, tmp_path, caplog):
    url, by = f"sqlite:///{tmp_path}/store.db", AuditContext("cli:tester", datetime.now(UTC))
    async with await open_store(url) as store:
        async with store.write() as connection:
            await create_tenant(connection, "acme", Limits(rpm=2), by)
            await create_tenant(connection, "gone", Limits(), by)
            await delete_tenant(connection, "gone", by)
        secret, _, _ = await add_key(store, "zeta", "zoe@zeta")
        async with asking(GatewaySettings(triton="127.0.0.1:1", port=0, store=url, oidc=issuer.settings())) as client:

            async def status(token: str, path="/v1/models") -> tuple[int, str]:
                answer = await client.get(path, headers=bearer(token))
                return answer.status_code, answer.json().get("error", {}).get("message", "")

            assert (await status(secret), await status(issuer.token())) == ((200, ""), (200, ""))
            assert (await status(issuer.token(), "/metrics"))[0] == 403
            metrics = await client.get("/metrics", headers=bearer(issuer.token(scope="llmops:metrics")))
            assert metrics.status_code == 200
            for tenant in ("gone", "nobody"):
                told = "The tenant in this token is not known here; ask the operator to create it."
                assert await status(issuer.token(tenant=tenant)) == (401, told)
            cannot = "The user in this token cannot be a member of its tenant; ask the operator to check the user's "
            for claims in ({"email": "zoe@zeta", "sub": "u-2"}, {"email": "no address", "sub": "x"}):
                assert await status(issuer.token(**claims)) == (401, cannot + "name and tenant.")
            assert (await status("x"))[1].endswith("nor a token (JWT) of its identity provider.")
            # the tenant's limits are the token's
            posts = [await client.post("/v1/chat/completions", json={}, headers=bearer(issuer.token())) for _ in "123"]
            assert [answer.status_code for answer in posts] == [400, 400, 429]
            assert "of tenant acme" in posts[2].json()["error"]["message"]
            token = issuer.token()
            await status(token)
        async with store.read() as connection:
            assert (await find_user(connection, "ann@acme")).tenant_id == "acme"
    assert token not in caplog.text


async def test_tokens_without_a_store(issuer):
    settings = GatewaySettings(triton="127.0.0.1:1", oidc=issuer.settings())
    assert keys_required(GatewaySettings(host="0.0.0.0", oidc=issuer.settings()))
    async with asking(settings) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=bearer(issuer.token()))).status_code == 200
        refused = await client.get("/v1/models", headers=bearer("sk-llmops-" + "x" * 32))
        assert "is not a token (JWT)" in refused.json()["error"]["message"]
