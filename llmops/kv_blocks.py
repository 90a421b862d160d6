"""Hashes of KV-cache blocks, for the gateway and for models inside Triton.

The module is copied to the models as `llmops_kv_blocks`.

A block's hash is xxh3-64 of its token ids (INT32, little-endian), with the hash of the block before
it as the seed, and the salt as the seed of the first block. So a hash identifies the whole prefix,
and equal prefixes have equal hashes everywhere. Only whole blocks have a hash.
"""

from __future__ import annotations

from struct import iter_unpack

from xxhash import xxh3_64_intdigest

_TOKEN_BYTES = 4


def adapter_salt(salt: int, adapter: int) -> int:
    """Return the salt of a LoRA adapter's blocks.

    The salt makes the blocks differ from the base model's blocks.
    """
    return xxh3_64_intdigest(adapter.to_bytes(8, "little"), salt) if adapter else salt


def block_hashes(ids: bytes, tokens_per_block: int, salt: int = 0) -> list[int]:
    """Return the unsigned 64-bit hashes of a sequence's whole blocks.

    `ids` are its tokens as INT32.
    """
    size = tokens_per_block * _TOKEN_BYTES
    hashes = []
    for (block,) in iter_unpack(f"{size}s", memoryview(ids)[: len(ids) // size * size]):
        salt = xxh3_64_intdigest(block, salt)
        hashes.append(salt)
    return hashes
