"""Secrets of API keys.

A secret has 190 random bits, so an unsalted hash reveals nothing about it.
"""

import hashlib
import re
import secrets
import string

PREFIX = "sk-llmops-"
VISIBLE_PREFIX_LENGTH = 12
"""Number of leading characters of a secret that are stored and shown."""
_LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_SECRET = re.compile(re.escape(PREFIX) + r"[0-9A-Za-z]{32}")
_HASH = re.compile(r"[0-9a-f]{64}")


def new_secret() -> str:
    return PREFIX + "".join(secrets.choice(_LETTERS) for _ in range(32))


def new_key_id() -> str:
    """Return a new id: `key-` and 12 lower-case letters and digits."""
    return "key-" + "".join(secrets.choice(string.digits + string.ascii_lowercase) for _ in range(12))


def is_secret(text: str) -> bool:
    """Return True if `text` has the form of a secret. The store is not read."""
    return _SECRET.fullmatch(text) is not None


def is_hash(text: str) -> bool:
    """Return True if `text` has the form of a secret's hash."""
    return _HASH.fullmatch(text) is not None


def hash_secret(secret: str) -> str:
    """Return the SHA-256 of a secret as hexadecimal text, the form in the store."""
    return hashlib.sha256(secret.encode()).hexdigest()
