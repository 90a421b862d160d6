"""Signatures of events in Kafka: other writers of the topic must not be able to bill requests.

A record carries an HMAC-SHA256 of its value in the header `llmops-signature`. The value names the
gateway and the event's number and id, so a signature is valid for one event of one gateway. A
record that is written twice is kept once, by its id.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from llmops.errors import InputError
from llmops.gateway.settings import KafkaSettings
from llmops.urls import is_usable_key

SIGNATURE_HEADER = "llmops-signature"
#: Minimum length of a key, in characters: 128 bits in hexadecimal digits.
MIN_KEY_LENGTH = 32
#: Maximum number of keys that are valid at once: the new key and the old key, during a rotation.
MAX_KEYS = 2
_DOMAIN = b"llmops.usage.v1\n"


def signing_keys(settings: KafkaSettings) -> Sequence[bytes]:
    """Return the keys. The first key signs, and all keys verify.

    Raises:
        InputError: No key is set, a key is too short or not printable, there are too many keys, or
            the file cannot be read.
    """
    text, source = settings.signing_keys or "", "the setting kafka.signing_keys"
    if settings.signing_keys_file is not None:
        source = f"the file {settings.signing_keys_file}"
        if settings.signing_keys:
            raise InputError("Give one of the settings kafka.signing_keys and kafka.signing_keys_file, not both.")
        try:
            text = settings.signing_keys_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InputError(
                f"The keys in {source} cannot be read ({why}); name a file with a key per line."
            ) from error
    keys = text.replace(",", " ").split()
    # A key of NULs, as a torn write leaves, would equal the empty key.
    if not 0 < len(keys) <= MAX_KEYS or min(map(len, keys)) < MIN_KEY_LENGTH or not all(map(is_usable_key, keys)):
        raise InputError(
            f"Events on a Kafka topic must be signed, and {source} has no usable keys ({len(keys)} found); give "
            f"gateways and control the same one or {MAX_KEYS} keys of at least {MIN_KEY_LENGTH} printable ASCII "
            "characters, such as `openssl rand -hex 32` makes."
        )
    return [key.encode() for key in keys]


def signature(key: bytes, value: bytes) -> bytes:
    """Return the signature of this value, which is the content of the header."""
    return hmac.digest(key, _DOMAIN + value, "sha256").hex().encode()


def is_signed(keys: Sequence[bytes], value: bytes, headers: Iterable[tuple[str, bytes | None]]) -> bool:
    """Return True if one of `keys` signed the value."""
    given = next((content for name, content in headers if name == SIGNATURE_HEADER), None)
    if not given:
        # `compare_digest` takes only ASCII texts of a signature's length.
        return False
    return any(hmac.compare_digest(signature(key, value), given) for key in keys)
