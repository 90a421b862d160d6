"""Callers without a verified key: their name comes from the address and a digest of the key they sent."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from ipaddress import IPv6Address

from llmops.gateway.interfaces import Caller


def anonymous_caller(host: str, credential: bytes) -> Caller:
    """The caller at an address, with what was sent as a key (empty for none). Neither can be told from the result."""
    return _cached_caller(host, hashlib.sha256(credential).hexdigest() if credential else "")


def client_network(host: str) -> str:
    """Whom an address belongs to: that of IPv4 to one client, of IPv6 the 64 bits that a network gives out."""
    if ":" not in host:
        return host
    address = IPv6Address(host)
    return str(address.ipv4_mapped or IPv6Address(address.packed[:8] + bytes(8)))


@lru_cache(maxsize=4096)
def _cached_caller(host: str, digest: str) -> Caller:
    client = client_network(host)
    return Caller(user_id=digest, share=f"{client}/{digest[:16]}" if digest else client)
