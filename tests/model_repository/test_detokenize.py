"""The detokenizer's rule: chunks joined are what decoding everything at once gives, whatever the chunks are."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmops_postprocessing.detokenize import text_delta
from tokenizers import Tokenizer

from tests.support.tokenizer_files import byte_level_tokenizer, sentencepiece_tokenizer

CONTEXT = 32
TEXTS = [
    "Hello world",
    " a  b",
    "naïve café",
    "你好，世界",
    "👩‍👩‍👧‍👦 family 🇫🇷",
    "def f(x):\n\treturn x",
    "áé…—",
    "\ufffd!",
    # more tokens of bytes than the context holds
    "👋🏽" * 9,
]


TOKENIZERS = {"a token per byte": byte_level_tokenizer((), 256), "pieces": sentencepiece_tokenizer(["Hello world"])}
BYTES = TOKENIZERS["a token per byte"]


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """The chunks as the engine and the detokenizer model make them: the last `CONTEXT` tokens go along."""
    chunks, position, turn = [], 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        turn += 1
        new = ids[position : position + size]
        context = ids[max(0, position - CONTEXT) : position]
        position += len(new)
        chunks.append(text_delta(decode_with(tokenizer), context, new, position >= len(ids)))
    return chunks


def decode_with(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    # the byte tokens of this tokenizer are special ones
    return partial(tokenizer.decode, skip_special_tokens=False)


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6).map(" ".join), sizes)
def test_chunks_join_to_the_text(kind: str, text: str, chunks: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids, chunks)) == decode_with(tokenizer)(ids)


@settings(max_examples=200)
@given(st.text(min_size=1, max_size=60), sizes)
def test_no_chunk_ends_inside_a_character(text: str, chunks: list[int]) -> None:
    so_far = ""
    for part in stream(BYTES, BYTES.encode(text).ids, chunks):
        so_far += part
        assert text.startswith(so_far)
    assert so_far == text


def test_broken_bytes_come_out_at_the_end_and_not_before() -> None:
    ids = BYTES.encode("ok 👋").ids[:-2]
    parts = stream(BYTES, ids, [1])
    assert parts[:3] == ["o", "k", " "]
    assert "".join(parts[:-1]) == "ok "
    assert "".join(parts) == BYTES.decode(ids) == "ok \ufffd"
