"""Authentication by tokens (JWT) of an identity provider (OpenID Connect)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

import jwt

from llmops.gateway.auth.credential_cache import EXPIRED_KEY_MESSAGE
from llmops.gateway.auth.directory import Directory, Identity
from llmops.gateway.auth.jwks import JwksCache
from llmops.gateway.errors import InvalidKeyError, PrematureTokenError
from llmops.gateway.interfaces import Caller
from llmops.gateway.settings import OidcSettings
from llmops.untrusted_text import is_safe_text

if TYPE_CHECKING:
    from llmops.gateway.auth.keys import KeyDirectory

#: Accepted signature algorithms. All of them are asymmetric: HS256 and similar algorithms sign with
#: the key that verifies, and a public key is not secret.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
KNOWN_SCOPES = frozenset({"inference", "usage", "metrics", "admin", "fairness"})
_JWT_FORM = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
_MAX_TOKEN_LENGTH = 16_384
_REQUIRED = ("exp", "iss", "aud", "sub")
_REJECTION_MESSAGES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (jwt.ExpiredSignatureError, EXPIRED_KEY_MESSAGE.replace("API key", "token")),
    (
        (jwt.InvalidAudienceError, jwt.InvalidIssuerError, jwt.MissingRequiredClaimError),
        "This token is not for this gateway; get one with exp and sub, and with this gateway's iss and aud.",
    ),
)
#: Exceptions that parsing an arbitrary token can raise. Each of them means that the token is
#: rejected.
_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
#: Maximum length of the name of a tenant, user or subject, in characters (OpenID Connect Core 1.0,
#: section 2).
_MAX_NAME_LENGTH = 255
#: Latest end of a token, in seconds since 1970: the year 2200. Later ends count as this time.
_MAX_EXPIRY = 7_258_118_400.0
INVALID_TOKEN_MESSAGE = "This token is malformed, or its issuer did not sign it; get a new one."


class OidcDirectory(Directory):
    """A directory of one issuer's tokens, which are checked against the issuer's public keys.

    The claims of a token name the tenant and the user. With `members`, both must be allowed by the
    store; without, the caller consists of these names alone.
    """

    foreign = "The credential is not a token (JWT) of this gateway's identity provider; get one there."

    def __init__(
        self, settings: OidcSettings, members: KeyDirectory | None = None, jwks: JwksCache | None = None
    ) -> None:
        self._settings, self._members = settings, members
        self._jwks = jwks or JwksCache(settings.issuer, settings.jwks, settings.refresh)

    def takes(self, credential: str) -> bool:
        return len(credential) <= _MAX_TOKEN_LENGTH and _JWT_FORM.fullmatch(credential) is not None

    async def has_credentials(self) -> bool:
        return True

    async def check(self, credential: str) -> None:
        await self._claims(credential)

    async def find(self, credential: str) -> Caller:
        claims = await self._claims(credential)
        wanted = self._settings.claims
        tenant = self._settings.tenant if _claim(claims, wanted.tenant) is None else _text(claims, wanted.tenant)
        subject = str(claims["sub"])
        user = _text(claims, wanted.user) or subject
        if not tenant:
            raise InvalidKeyError(
                f"This token has no claim '{wanted.tenant}', which names its tenant; ask the operator to add the claim."
            )
        if any(not 0 < len(name) <= _MAX_NAME_LENGTH or not is_safe_text(name) for name in (tenant, user, subject)):
            raise InvalidKeyError(
                "This token names its tenant or user with characters that names must not have; ask the operator to "
                "change the name."
            )
        # A subject in the form of an address names the user of that address, too.
        if (user != subject or "@" in subject) and _is_unverified(claims, wanted.user):
            raise InvalidKeyError(
                "The address in this token is not verified by its issuer; verify it there and get a new token."
            )
        until = _expiry(claims["exp"]) + self._settings.leeway
        scopes = self._scopes(claims)
        if self._members is not None:
            identity, owns = Identity(self._settings.issuer, subject), _owns_address(claims, wanted.user, user)
            return await self._members.member(tenant, user, identity, scopes, until, owns_address=owns)
        # Quoted, because the name must not end the parts before or behind it.
        quoted = quote(tenant, safe="")
        # A person in two tenants is two users.
        user_id = str(uuid5(NAMESPACE_URL, f"{self._settings.issuer}#{quoted}#{subject}"))
        return Caller(tenant, user_id, share=f"{quoted}/{user_id}", scopes=scopes, until=until)

    async def close(self) -> None:
        await self._jwks.close()

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a valid token.

        Raises:
            InvalidKeyError: The token is not valid. The message contains only what its sender may
                know.
            UnavailableError: The issuer's keys cannot be fetched.
        """
        try:
            header = jwt.get_unverified_header(token)
            algorithm, kid = header.get("alg"), header.get("kid")
        except _UNREADABLE as error:
            raise InvalidKeyError(INVALID_TOKEN_MESSAGE) from error
        if kid is not None and not isinstance(kid, str):
            raise InvalidKeyError(INVALID_TOKEN_MESSAGE)
        if algorithm not in self._settings.algorithms:
            raise InvalidKeyError(
                f"This gateway accepts tokens signed with {', '.join(self._settings.algorithms)}; this token is "
                "signed with another algorithm."
            )
        key = await self._jwks.find(kid, algorithm)
        if key is None:
            raise InvalidKeyError(INVALID_TOKEN_MESSAGE)
        try:
            return jwt.decode(
                token, key, [algorithm], {"require": list(_REQUIRED)},
                audience=self._settings.audience, issuer=self._settings.issuer, leeway=self._settings.leeway,
            )  # fmt: skip
        except jwt.ImmatureSignatureError as error:
            raise PrematureTokenError("This token is not valid yet; try again later.") from error
        except _UNREADABLE as error:
            messages = (text for kind, text in _REJECTION_MESSAGES if isinstance(error, kind))
            raise InvalidKeyError(next(messages, INVALID_TOKEN_MESSAGE)) from error

    def _scopes(self, claims: Mapping[str, Any]) -> frozenset[str]:
        """Return this gateway's scopes in the token, or the default scopes if the token names none."""
        value = _claim(claims, self._settings.claims.scopes)
        names = value.split() if isinstance(value, str) else value if isinstance(value, list) else ()
        prefix = self._settings.scope_prefix
        mine = {name.removeprefix(prefix) for name in names if isinstance(name, str) and name.startswith(prefix)}
        return frozenset(mine & KNOWN_SCOPES) or frozenset(self._settings.scopes)


def _expiry(value: Any) -> float:
    """Return the claim `exp` in seconds since 1970, at most the year 2200.

    Raises:
        InvalidKeyError: The claim is not a number.
    """
    try:
        end = float(value) if value < _MAX_EXPIRY else _MAX_EXPIRY
    except _UNREADABLE as error:
        raise InvalidKeyError(INVALID_TOKEN_MESSAGE) from error
    if math.isnan(end):
        raise InvalidKeyError(INVALID_TOKEN_MESSAGE)
    return end


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim named `path`; if there is none, the nested claim at the path `a.b`."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_unverified(claims: Mapping[str, Any], path: str) -> bool:
    """Return True if the issuer marks the address at `email` or `a.email` as unverified.

    The claim `email_verified` beside the address is then false.
    """
    parent, _, name = path.rpartition(".")
    if path in claims or not parent:
        beside: Any = claims
        name = path
    else:
        beside = _claim(claims, parent)
    return isinstance(beside, Mapping) and beside.get(f"{name}_verified", True) not in (True, "true")


def _owns_address(claims: Mapping[str, Any], path: str, user: str) -> bool:
    """Return True if the issuer vouches that the address `user`, found at `path`, is the user's.

    At many issuers, users choose names such as `preferred_username` freely.
    """
    if path.endswith("email"):
        return True
    return _text(claims, "email").lower() == user.lower() and not _is_unverified(claims, "email")


def _text(claims: Mapping[str, Any], path: str) -> str:
    value = _claim(claims, path)
    return value if isinstance(value, str) else ""
