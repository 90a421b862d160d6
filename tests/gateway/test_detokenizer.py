"""Streamed text equals one decode, whatever the cut, for the kinds of tokenizers that models have."""

import functools
import itertools
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from llmops.gateway.text.detokenizer import ByteLevelDetokenizer, DetokenizerFactory, WindowDetokenizer
from tests.support.tokenizer_files import byte_level_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two  leading and  inner spaces\n\tand a tab\n",
    "你好，世界！ 今日はいい天気ですね。",
    "مرحبا بالعالم كيف حالك",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301a\u0308 ก็ที่",
    "def f(x):\n    return x ** 2  # square\n",
]


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM."""
    tokenizer = byte_level_tokenizer(TEXTS, 500, ["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken(" spaced token ", special=False)])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """Llama 2, Mistral, Gemma: SentencePiece with ▁ for spaces, raw bytes for what is not in the vocabulary."""
    characters = sorted(set("".join(TEXTS[:2])) - {"\n", "\t"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", "▁▁", "▁the", "he", "qu", "▁The", "\ufffd", "世", *characters]
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Unigram with the Metaspace decoder (T5 and others)."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer = DetokenizerFactory(tokenizer).make(skip)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [*[detokenizer.feed(ids[a:b]) for a, b in itertools.pairwise(bounds) if b > a], detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_any_ids_cut_anywhere_stream_to_one_decode(kind, data):
    tokenizer = KINDS[kind]()
    # ids beyond the vocabulary too: engines pad their logits, so such an id can be sampled
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    assert "".join(streamed(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_text_comes_with_its_token_and_not_later():
    tokenizer = byte_level()
    ids = tokenizer.encode("The quick brown fox").ids
    detokenizer = DetokenizerFactory(tokenizer).make(True)
    for i in ids:
        assert detokenizer.feed([i]) == tokenizer.decode([i])
    assert detokenizer.flush() == ""


def test_the_decoder_is_read_without_the_vocabulary():
    tokenizer = byte_level()
    names = ("decoder", "get_added_tokens_decoder", "token_to_id")
    without = types.SimpleNamespace(**{name: getattr(tokenizer, name) for name in names})
    assert type(DetokenizerFactory(without).make(True)) is ByteLevelDetokenizer


def byte_tokens(text: str) -> list[str]:
    """Single-byte tokens of `text` in GPT-2's alphabet, from the tokenizers library itself."""
    return list(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])


def test_the_fast_way_is_taken_where_it_is_exact():
    looks_so = Tokenizer.from_str(byte_level().to_str())
    looks_so.decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    found = [type(DetokenizerFactory(one).make(True)) for one in (byte_level(), metaspace(), looks_so)]
    assert found == [ByteLevelDetokenizer, WindowDetokenizer, WindowDetokenizer]


def test_the_bytes_of_a_token():
    """The field `bytes` of `logprobs` has these bytes."""
    euro = dict(zip(byte_tokens("€"), (b"\xe2", b"\x82", b"\xac"), strict=True))
    whole = {text: text.encode() for text in ("<|end|>", " spaced token ")}
    fallback = {"<0x0A>": b"\n", "<0xFF>": b"\xff", "▁The": b" The", "世": "世".encode()}
    for tokenizer, tokens in ((byte_level(), {"Ġ": b" ", **euro, **whole}), (byte_fallback(), fallback)):
        factory = DetokenizerFactory(tokenizer)
        assert {text: factory.token_bytes(tokenizer.token_to_id(text)) for text in tokens} == tokens
        assert factory.token_bytes(99999) == b""


def test_the_work_for_a_token_does_not_grow_with_an_answer_of_replacement_characters():
    """Before, 8,000 of them took 19 s of the event loop, and nothing was sent before the last one."""
    tokenizer = byte_fallback()
    count, decoded = 2000, 0

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, **options):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, **options)

    token = tokenizer.token_to_id("\ufffd")
    stream = WindowDetokenizer(Counting(), frozenset(), frozenset())
    texts = [stream.feed([token]) for _ in range(count)]
    assert "".join([*texts, stream.flush()]) == tokenizer.decode([token] * count)
    assert decoded < 100 * count


def test_control_tokens_are_kept_where_they_are_asked_for():
    tokenizer = byte_level()
    factory, end = DetokenizerFactory(tokenizer), tokenizer.token_to_id("<|end|>")
    hi = tokenizer.encode("he").ids
    fed = [(factory.make(skip).feed([*hi, end, *hi]), factory.make(skip).feed([end])) for skip in (True, False)]
    assert fed == [("hehe", ""), ("he<|end|>he", "<|end|>")]
    assert [factory.is_special(text) for text in ("<|end|>", "<tool_call>", "no token")] == [True, False, False]
