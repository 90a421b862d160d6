"""The detokenizer's rule: chunks joined are what decoding everything at once gives, whatever the chunks are."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from llmops_postprocessing.detokenize import text_delta
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
]


@cache
def byte_level() -> Tokenizer:
    """One token per byte, as GPT-2's alphabet writes them: each character of more than one byte is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece's way (Llama 2, Gemma): word pieces with ▁ for spaces, and byte tokens for all else."""
    pieces = ["▁Hello", "▁world", "▁a", "▁", "b", "caf", "é"]
    vocab = {token: index for index, token in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """The chunks as the engine and the detokenizer model make them: the last `CONTEXT` tokens go along."""
    chunks, position, turn = [], 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        turn += 1
        new = ids[position : position + size]
        context = ids[max(0, position - CONTEXT) : position]
        position += len(new)
        chunks.append(text_delta(tokenizer.decode, context, new, position >= len(ids)))
    return chunks


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=200)
@given(st.text(min_size=1, max_size=60), sizes)
def test_byte_level_chunks_join_to_the_text(text: str, chunks: list[int]) -> None:
    ids = byte_level().encode(text).ids
    parts = stream(byte_level(), ids, chunks)
    assert "".join(parts) == byte_level().decode(ids) == text


@settings(max_examples=200)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6), sizes)
def test_byte_fallback_chunks_join_to_the_text(texts: list[str], chunks: list[int]) -> None:
    tokenizer = byte_fallback()
    ids = [index for text in texts for index in pieces(tokenizer, text)]
    assert "".join(stream(tokenizer, ids, chunks)) == tokenizer.decode(ids)


def pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    """Each known piece as one token, everything else byte by byte."""
    found = []
    for word in text.replace(" ", "▁").split("▁"):
        whole = tokenizer.token_to_id("▁" + word)
        found += [whole] if whole is not None else [tokenizer.token_to_id("▁")]
        if whole is None:
            found += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in word.encode()]
    return found


@settings(max_examples=100)
@given(st.text(min_size=1, max_size=40))
def test_no_chunk_ends_inside_a_character(text: str) -> None:
    ids = byte_level().encode(text).ids
    so_far = ""
    for part in stream(byte_level(), ids, [1]):
        so_far += part
        assert text.startswith(so_far)


def test_broken_bytes_come_out_at_the_end_and_not_before() -> None:
    ids = byte_level().encode("ok 👋").ids[:-2]
    parts = stream(byte_level(), ids, [1])
    assert parts[:3] == ["o", "k", " "]
    assert "".join(parts[:-1]) == "ok "
    assert "".join(parts) == byte_level().decode(ids) == "ok \ufffd"
