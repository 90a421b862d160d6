"""The names of KV-cache blocks, which gateway and engine models must make alike."""

import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from llmops.kv_blocks import adapter_salt, block_hashes
from llmops.sequences import common_prefix_length

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def test_a_block_is_its_tokens_after_the_block_before_it() -> None:
    first = xxhash.xxh3_64(struct.pack("<2i", 7, 128_000), seed=42).intdigest()
    second = xxhash.xxh3_64(struct.pack("<2i", 0, 1), seed=first).intdigest()
    assert block_hashes(packed([7, 128_000, 0, 1, 9]), 2, salt=42) == [first, second]


def test_without_a_salt_the_first_block_has_the_seed_0() -> None:
    assert block_hashes(packed([7]), 1) == [xxhash.xxh3_64(struct.pack("<i", 7), seed=0).intdigest()]


def test_an_adapters_blocks_start_from_its_number_and_the_salt() -> None:
    assert adapter_salt(42, 0) == 42
    assert adapter_salt(42, 7) == xxhash.xxh3_64(struct.pack("<q", 7), seed=42).intdigest()


@given(IDS, IDS, IDS, st.integers(1, 16))
def test_equal_beginnings_have_equal_hashes_and_others_have_not(start, one, other, size):
    first, second = start + one, start + other
    alike = common_prefix_length(first, second)
    pairs = list(zip(block_hashes(packed(first), size), block_hashes(packed(second), size), strict=False))
    assert [a == b for a, b in pairs] == [True] * (alike // size) + [False] * (len(pairs) - alike // size)


@given(IDS, st.integers(1, 16))
def test_another_salt_shares_nothing(ids: list[int], size: int) -> None:
    assert not set(block_hashes(packed(ids), size, 1)) & set(block_hashes(packed(ids), size, 2))
