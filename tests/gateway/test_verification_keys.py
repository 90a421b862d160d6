"""The entries of a key set: which of them check the signatures of which tokens."""

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

from llmops.gateway.auth.jwks import JwksCache
from llmops.gateway.auth.oidc import ALGORITHMS
from llmops.gateway.auth.verification_keys import read_verification_key
from llmops.gateway.errors import InvalidKeyError, UnavailableError
from tests.gateway.test_oidc import Issuer, issuer, provider, public_jwk, tokens_of  # noqa: F401
from tests.support.pages import Page, PageServer

PRIVATE: dict[str, PrivateKeyTypes] = {
    "RSA": rsa.generate_private_key(65537, 2048),
    "RSA 1024": rsa.generate_private_key(65537, 1024),
    "RSA e=3": rsa.generate_private_key(3, 2048),
    "P-256": ec.generate_private_key(ec.SECP256R1()),
    "P-384": ec.generate_private_key(ec.SECP384R1()),
    "P-521": ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate(),
    "Ed448": ed448.Ed448PrivateKey.generate(),
}
RSA, P256, P384, ED25519 = (public_jwk(PRIVATE[name]) for name in ("RSA", "P-256", "P-384", "Ed25519"))
OTHER_RSA = public_jwk(rsa.generate_private_key(65537, 2048))
del RSA["key_ops"], OTHER_RSA["key_ops"]


def octets_to_base64(octets: bytes) -> str:
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()


async def is_accepted(issuer: Issuer, entries: list, token: str) -> bool:  # noqa: F811
    """Return True if a gateway accepts the token of an issuer who publishes these entries."""
    with PageServer(lambda _: Page(json.dumps({"keys": entries}))) as server:
        async with tokens_of(issuer, jwks=f"{server.url}/keys", algorithms=ALGORITHMS) as tokens:
            try:
                return bool(await tokens.find(token))
            except (InvalidKeyError, UnavailableError):
                return False


#: A name, the key that signs, the algorithm of its token, the entries of the set, and the result.
TABLE = [
    ("no fields but the key's", "RSA", "RS256", [RSA], True),
    ("PS512 of the same key", "RSA", "PS512", [RSA], True),
    ("P-256", "P-256", "ES256", [P256], True),
    ("P-384", "P-384", "ES384", [P384], True),
    ("P-521", "P-521", "ES512", [public_jwk(PRIVATE["P-521"])], True),
    ("Ed25519", "Ed25519", "EdDSA", [ED25519], True),
    ("Ed448", "Ed448", "EdDSA", [public_jwk(PRIVATE["Ed448"])], True),
    # sections 4.2 and 4.3: the use of a key
    ("use sig", "RSA", "RS256", [RSA | {"use": "sig", "key_ops": ["verify"]}], True),
    ("fields without a value", "RSA", "RS256", [RSA | {"use": None, "key_ops": None, "alg": None}], True),
    ("use enc", "RSA", "RS256", [RSA | {"use": "enc"}], False),
    ("use of another kind", "RSA", "RS256", [RSA | {"use": "tls"}], False),
    ("use that is a list", "RSA", "RS256", [RSA | {"use": ["sig"]}], False),
    ("key_ops to encrypt", "RSA", "RS256", [RSA | {"key_ops": ["encrypt"]}], False),
    ("key_ops to derive", "P-256", "ES256", [P256 | {"key_ops": ["deriveKey"]}], False),
    ("no operation", "RSA", "RS256", [RSA | {"key_ops": []}], False),
    ("key_ops that are a text", "RSA", "RS256", [RSA | {"key_ops": "verify"}], False),
    ("key_ops against use", "RSA", "RS256", [RSA | {"use": "sig", "key_ops": ["encrypt"]}], False),
    # section 4.4: the algorithm of a key
    ("its algorithm", "RSA", "RS256", [RSA | {"alg": "RS256"}], True),
    ("another algorithm", "RSA", "PS256", [RSA | {"alg": "RS256"}], False),
    ("an algorithm of encryption", "RSA", "RS256", [RSA | {"alg": "RSA-OAEP"}], False),
    ("an algorithm of another type", "RSA", "RS256", [RSA | {"alg": "ES256"}], False),
    ("an algorithm that is a list", "RSA", "RS256", [RSA | {"alg": ["RS256"]}], False),
    # section 4.5: the id of a key
    ("the id of another type", "P-256", "ES256", [RSA, P256], True),
    ("the id of another curve", "P-384", "ES384", [P256, P384], True),
    ("the id of a key for encryption", "RSA", "RS256", [OTHER_RSA | {"use": "enc"}, RSA], True),
    ("the id of a key for PS256", "RSA", "RS256", [OTHER_RSA | {"alg": "PS256"}, RSA], True),
    ("the id of a weak key", "RSA", "RS256", [public_jwk(PRIVATE["RSA 1024"]), RSA], True),
    ("the id of an equal key, which stands first", "RSA", "RS256", [OTHER_RSA, RSA], False),
    ("an id that is a number", "RSA", "RS256", [RSA | {"kid": 7}, P256], False),
    # the numbers of a key
    ("1,024 bits", "RSA 1024", "RS256", [public_jwk(PRIVATE["RSA 1024"]) | {"key_ops": None}], False),
    ("the exponent 3", "RSA e=3", "RS256", [public_jwk(PRIVATE["RSA e=3"]) | {"key_ops": None}], False),
    ("an exponent of 33 bits", "RSA", "RS256", [RSA | {"e": octets_to_base64((2**32 + 1).to_bytes(5, "big"))}], False),
    ("the other curve of the token", "P-256", "ES256", [P384], False),
    ("a curve that the key is not on", "P-256", "ES256", [P256 | {"crv": "P-384"}], False),
    ("a point beside the curve", "P-256", "ES256", [P256 | {"y": P256["x"]}], False),
    ("a secret key", "RSA", "RS256", [{"kty": "oct", "k": "c2VjcmV0"}], False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "algorithm", "entries", "accepted"), TABLE, ids=[row[0] for row in TABLE])
async def test_entries_of_a_key_set(issuer, name, key, algorithm, entries, accepted):  # noqa: F811
    """Before the fix, keys for other operations than `verify` and keys of 1,024 bits checked tokens."""
    entries = [{"kid": "k", **entry} for entry in entries]
    token = issuer.token(algorithm=algorithm, key=PRIVATE[key], headers={"kid": "k"})
    assert await is_accepted(issuer, entries, token) is accepted


_P25519, _P448 = 2**255 - 19, 2**448 - 2**224 - 1
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826


@pytest.mark.parametrize(
    ("curve", "y"),
    [("Ed25519", y) for y in (0, 1, _P25519 - 1, _ORDER_8, _P25519 - _ORDER_8, _P25519, _P25519 + 1)]
    + [("Ed448", y) for y in (0, 1, _P448 - 1, _P448, _P448 + 1)],
)
@pytest.mark.parametrize("sign", [0, 1])
def test_no_key_of_small_order_is_taken(curve, y, sign):
    """Before the fix, `1, 0` was its signature of one text in eight, or of every text."""
    length = 32 if curve == "Ed25519" else 57
    octets = (y | sign << 8 * length - 1).to_bytes(length, "little")
    assert read_verification_key({"kty": "OKP", "crv": curve, "x": octets_to_base64(octets)}) is None


async def test_a_weak_key_beside_a_good_one_is_logged_once(issuer, caplog):  # noqa: F811
    """Before, the tokens that it signed were refused without a word."""
    weak = public_jwk(PRIVATE["RSA 1024"])
    other = [{"kty": "oct", "k": "a", "kid": "other"}, RSA | {"use": "enc", "n": "AQAB", "kid": "other"}]
    many = [weak | {"kid": f"many-{number}"} for number in range(500)]
    entries = [RSA | {"kid": "good"}, weak | {"kid": "a\x1b\n" + "b" * 10_000}, weak | {"kid": 5}, *other]
    cache = JwksCache("https://issuer.example", "https://issuer.example/keys", 60)

    async def fetched(url: str) -> dict:
        return {"keys": entries}

    cache._json = fetched
    for _ in range(3):
        assert list(await cache._fetch()) == [None, "good"]
    first, second = caplog.messages
    assert r"The key 'a\\x1b" in first
    assert len(first) < 1000
    assert second.startswith("A key without an id of https://issuer.example is weak or damaged")
    entries += many
    await cache._fetch()
    assert len(caplog.messages) == 100
