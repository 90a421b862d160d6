"""The blocks of a KV cache by name: of the gateway, and beside the models inside Triton (`llmops_kv_blocks`).

A block's hash is xxh3-64 of its token ids (INT32, little-endian) with the hash of the block before it as the seed; that
of the first has the salt. So it stands for all that comes before it too, and equal prefixes have equal hashes wherever
they are made. Only whole blocks have one.
"""

from __future__ import annotations

from struct import iter_unpack

from xxhash import xxh3_64_intdigest

_TOKEN_BYTES = 4


def adapter_salt(salt: int, adapter: int) -> int:
    """What the blocks of a LoRA adapter's requests start from: they have nothing in common with its base model's."""
    return xxh3_64_intdigest(adapter.to_bytes(8, "little"), salt) if adapter else salt


def block_hashes(ids: bytes, tokens_per_block: int, salt: int = 0) -> list[int]:
    """Unsigned 64-bit hashes of the whole blocks of a sequence, in order. `ids`: INT32, as they travel."""
    size = tokens_per_block * _TOKEN_BYTES
    hashes = []
    for (block,) in iter_unpack(f"{size}s", memoryview(ids)[: len(ids) // size * size]):
        salt = xxh3_64_intdigest(block, salt)
        hashes.append(salt)
    return hashes
