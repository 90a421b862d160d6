"""Public keys that check signatures, read from the entries of a JSON Web Key Set (RFC 7517).

The checks stand beside PyJWT, which takes keys of any size and purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jwt import PyJWTError
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

#: Signature algorithms by the type and curve of the keys that check them (RFC 7518, 8037).
_ALGORITHMS = {
    ("RSA", None): frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}),
    ("EC", "P-256"): frozenset({"ES256"}),
    ("EC", "P-384"): frozenset({"ES384"}),
    ("EC", "P-521"): frozenset({"ES512"}),
    ("OKP", "Ed25519"): frozenset({"EdDSA"}),
    ("OKP", "Ed448"): frozenset({"EdDSA"}),
}
_READERS = {"RSA": RSAAlgorithm.from_jwk, "EC": ECAlgorithm.from_jwk, "OKP": OKPAlgorithm.from_jwk}
#: Fields that are read. The private fields, which an issuer may publish by mistake, would make
#: each check of a token take 0.4 s.
_PUBLIC_FIELDS = ("kty", "n", "e", "crv", "x", "y")
#: Minimum length of an RSA modulus in bits (RFC 7518, section 3.3).
_MIN_MODULUS_BITS = 2048
#: Maximum length of an RSA modulus in base64 characters, which is 16,384 bits: checking a signature
#: takes longer with each bit.
_MAX_MODULUS_LENGTH = 2731
#: RSA exponents from 65,537 (FIPS 186-5) to 32 bits. Others are errors of the issuer, and an
#: exponent as long as the modulus makes a check 25 times slower.
_EXPONENTS = range(2**16 + 1, 2**32)
#: The primes of the fields of Edwards curves, and `y` of their points of small order: such a key
#: takes forged signatures. Each point's negative has the same `y`.
_ED25519_PRIME, _ED448_PRIME = 2**255 - 19, 2**448 - 2**224 - 1
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = {
    "Ed25519": (_ED25519_PRIME, {0, 1, _ED25519_PRIME - 1, _ORDER_8, _ED25519_PRIME - _ORDER_8}),
    "Ed448": (_ED448_PRIME, {0, 1, _ED448_PRIME - 1}),
}


class VerificationKey(NamedTuple):
    """A public key of the library `cryptography`, and the algorithms whose signatures it checks."""

    key: Any
    algorithms: frozenset[str]


def read_verification_key(entry: Any) -> VerificationKey | None:
    """Return the key of an entry of a key set; None if it is not a strong public key for signatures."""
    algorithms = signature_algorithms(entry)
    if not algorithms:
        return None
    modulus, curve = entry.get("n", ""), None if entry["kty"] == "RSA" else entry["crv"]
    if not isinstance(modulus, str) or len(modulus) > _MAX_MODULUS_LENGTH:
        return None
    try:
        key: Any = _READERS[entry["kty"]]({name: entry[name] for name in _PUBLIC_FIELDS if name in entry})
    except (PyJWTError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return VerificationKey(key, algorithms) if _is_strong(key, curve) else None


def signature_algorithms(entry: Any) -> frozenset[str]:
    """Return the algorithms of an entry that is for signatures; none if it has another purpose or kind."""
    if not isinstance(entry, Mapping) or not _is_for_signatures(entry):
        return frozenset()
    kind, algorithm = entry.get("kty"), entry.get("alg")
    curve = None if kind == "RSA" else entry.get("crv")
    if not isinstance(kind, str) or not isinstance(curve, str | None):
        return frozenset()
    algorithms = _ALGORITHMS.get((kind, curve), frozenset())
    if algorithm is None:
        return algorithms
    # A key that names its algorithm is valid only for this algorithm.
    return algorithms & {algorithm} if isinstance(algorithm, str) else frozenset()


def _is_for_signatures(entry: Mapping[str, Any]) -> bool:
    """Return True if the fields `use` and `key_ops`, where the entry has them, allow signatures."""
    operations = entry.get("key_ops")
    return entry.get("use") in (None, "sig") and (
        operations is None or (isinstance(operations, list) and "verify" in operations)
    )


def _is_strong(key: Any, curve: str | None) -> bool:
    """Return False for RSA keys with unusual numbers, and for keys of small order."""
    if curve is None:
        return key.key_size >= _MIN_MODULUS_BITS and key.public_numbers().e in _EXPONENTS
    if curve not in _SMALL_ORDER:
        return True
    prime, forgeable = _SMALL_ORDER[curve]
    encoded = key.public_bytes_raw()
    # The highest bit is the sign of `x`.
    y = int.from_bytes(encoded, "little") & (1 << 8 * len(encoded) - 1) - 1
    return y % prime not in forgeable
