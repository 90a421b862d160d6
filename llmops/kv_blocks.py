"""Hashes of KV-cache blocks, for the gateway and for the models inside Triton.

`llmops repo` copies the module beside these models, as `llmops_kv_blocks.py`. The hash of a block
is the xxh3-64 of its token ids (INT32, little-endian). The seed is the hash of the block before, or
the salt for the first block. So a hash identifies the whole prefix up to the end of its block, and
equal prefixes have equal hashes in every process. An incomplete last block has no hash.
"""

from __future__ import annotations

from struct import iter_unpack

from xxhash import xxh3_64_intdigest

_TOKEN_BYTES = 4


def adapter_salt(salt: int, adapter: int) -> int:
    """Return the salt for prompts that a LoRA adapter answers.

    The salt gives the adapter's blocks other hashes than the base model's.
    """
    return xxh3_64_intdigest(adapter.to_bytes(8, "little"), salt) if adapter else salt


def block_hashes(ids: bytes, tokens_per_block: int, salt: int = 0) -> list[int]:
    """Return the unsigned 64-bit hashes of the complete blocks of a sequence.

    `ids` are the INT32 token ids as bytes. The hash of a block depends on `salt` and on all blocks
    before it.
    """
    size = tokens_per_block * _TOKEN_BYTES
    hashes = []
    for (block,) in iter_unpack(f"{size}s", memoryview(ids)[: len(ids) // size * size]):
        salt = xxh3_64_intdigest(block, salt)
        hashes.append(salt)
    return hashes
