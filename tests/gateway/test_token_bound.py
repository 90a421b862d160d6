"""The bound on tokens is never above what the tokenizer makes: on the bundled tokenizer and on unusual ones."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from llmops.build.checkpoint import open_checkpoint
from llmops.build.tokenizer import write_tokenizer
from llmops.gateway.text import tokenizer as tokenizer_module
from llmops.gateway.text.tokenizer import TextTokenizer
from tests.support.tokenizer_files import byte_level_tokenizer, write_wordpiece_tokenizer

CORPUS = ["The capital of Norway is Oslo.  1234567 12", "def f(x):\n        return x\n" * 3, "你好 🙂 é Å", "   a    b"]
BYTES = {f"<0x{value:02X}>": value for value in range(256)}
AB = {"<unk>": 0, "a": 1, "b": 2, "ab": 3}


@pytest.fixture(scope="session")
def smollm2_tokenizer(tmp_path_factory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("smollm2") / "tokenizer"
    write_tokenizer(open_checkpoint("smollm2"), folder, pytest.fail)
    return TextTokenizer(folder)


def byte_level(**changes) -> Tokenizer:
    tokenizer = byte_level_tokenizer(CORPUS * 4, 420)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def digits_apart() -> Tokenizer:
    """SmolLM's and Qwen's way: composed first, digits one by one."""
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return byte_level(normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.Sequence(splits))


def lacking(normalizer=None) -> Tokenizer:
    """SmolLM2's own gap: some bytes are in no token, and vanish."""
    vocabulary = {char: at for at, char in enumerate(pre_tokenizers.ByteLevel.alphabet()) if char not in "aòĆ7"}
    vocabulary |= {"th": 300, "the": 301, "ĠĠ": 302}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizer
    return tokenizer


def sentencepiece(model: str) -> Tokenizer:
    """Llama 2's form: raw bytes for what the vocabulary lacks, a sign for the space."""
    pieces = ["<unk>", *BYTES, "▁", "▁the", "the", "t", "h", "e", "▁▁▁▁", "777", "7"]
    if model == "unigram":
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        return tokenizer
    vocabulary = {piece: at for at, piece in enumerate([*pieces, "th", "77"])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("7", "7"), ("77", "7")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {
    "byte level": byte_level,
    "digits apart": digits_apart,
    "bytes that are lacking": lacking,
    "lacking and composed": lambda: lacking(normalizers.NFC()),
    "SentencePiece BPE": lambda: sentencepiece("bpe"),
    "SentencePiece unigram": lambda: sentencepiece("unigram"),
    "unknown characters": lambda: Tokenizer(models.BPE(AB, [("a", "b")], unk_token="<unk>")),
}


def before_bytes(first: pre_tokenizers.PreTokenizer) -> Tokenizer:
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


REMOVING = {
    "white space before bytes are made": lambda: before_bytes(pre_tokenizers.WhitespaceSplit()),
    "a split that removes before bytes are made": lambda: before_bytes(pre_tokenizers.Split(" ", "removed")),
    "white space between words": lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
    "a split that removes": lambda: byte_level(pre_tokenizer=pre_tokenizers.Split(Regex(r"\d"), "removed")),
    "a normaliser that removes": lambda: byte_level(normalizer=normalizers.Replace("a", "")),
    "compatibility forms": lambda: byte_level(normalizer=normalizers.NFKC()),
    "words as a whole": lambda: Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "unknown characters put together": lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    "unknown characters left out": lambda: Tokenizer(models.BPE({"a": 0}, [])),
}
KINDS = BOUNDED | REMOVING
RUNS = st.tuples(
    st.sampled_from(["7", " ", "the", "ab", "é", "e\u0301", "🙂", "\u1fbe", "▁", "a b 7 "]), st.integers(1, 20_000)
).map(lambda run: run[0] * run[1])
TEXTS = st.lists(st.one_of(st.text(max_size=30), RUNS), max_size=4).map("".join)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, TextTokenizer]:
    found = {}
    for name, make in KINDS.items():
        place = tmp_path_factory.mktemp("tokenizer")
        make().save(str(place / "tokenizer.json"))
        found[name] = TextTokenizer(place)
    return found


@pytest.mark.parametrize("name", KINDS)
@given(text=TEXTS)
@example(text="7" * 40_000)
@example(text="\u1fbe\u0308\u0301" * 20_000)
@settings(max_examples=8, deadline=None)
def test_never_more_than_there_are(made, name: str, text: str) -> None:
    # with 0 tokens of context, each text is counted piece by piece to its end
    most = len(text) * 4
    least = max(made[name].min_token_count(text, enough) for enough in (0, most // 8, most))
    assert least <= len(made[name].encode(text, add_special_tokens=False))


def test_it_is_worth_something(smollm2_tokenizer) -> None:
    assert smollm2_tokenizer.min_token_count("7" * 1_000_000, 8192) > 8192
    # beside a long context, a long text is not tokenized whole either
    assert smollm2_tokenizer.min_token_count("7" * 400_000, 131_072) > 131_072
    # it stops when it knows enough
    assert 8192 < smollm2_tokenizer.min_token_count("7" * 16_000_000, 8192) < 100_000


def test_a_text_that_the_normalizer_multiplies_is_counted_in_small_pieces(tmp_path, monkeypatch) -> None:
    """Before the fix, 36 KB were 192,000 tokens at once, and other clients waited behind twenty such texts."""
    byte_level(normalizer=normalizers.NFKC()).save(str(tmp_path / "tokenizer.json"))
    tokenizer, made, encode = TextTokenizer(tmp_path), [], TextTokenizer.encode

    def counted(self, part, **options):
        made.append(len(found := encode(self, part, **options)))
        return found

    monkeypatch.setattr(TextTokenizer, "encode", counted)
    assert tokenizer.min_token_count("\ufdfa" * 12_000, 8192) > 8192
    assert max(made) < 2 * 2**15


@pytest.mark.parametrize(("text", "slow"), [("\ufdfa", False), ("a", True)])
def test_a_text_that_the_normalizer_multiplies_makes_no_tokenizer_slow(tmp_path, monkeypatch, text, slow) -> None:
    """Before the fix, other clients' short texts waited behind such texts, in the lane of slow tokenizers."""
    byte_level(normalizer=normalizers.NFKC()).save(str(tmp_path / "tokenizer.json"))
    tokenizer, times = TextTokenizer(tmp_path), iter((0.0, 0.3))
    monkeypatch.setattr(tokenizer_module, "thread_time", lambda: next(times))
    tokenizer.encode(text * 12_000)
    assert tokenizer.is_slow == slow


def test_a_long_text_that_fits_is_not_tokenized_twice(smollm2_tokenizer, monkeypatch) -> None:
    text, tokenized, encode = "The weather of today is rather fine. " * 10_000, [], TextTokenizer.encode

    def counted(self, part, **options):
        tokenized.append(len(part))
        return encode(self, part, **options)

    monkeypatch.setattr(TextTokenizer, "encode", counted)
    assert smollm2_tokenizer.min_token_count(text, 131_072) == 0
    assert sum(tokenized) < len(text) / 10


def test_a_cut_through_a_word_adds_no_tokens(tmp_path) -> None:
    # what the cut leaves of the word are 100 tokens, and the whole word is one
    tokenizer = TextTokenizer(write_wordpiece_tokenizer(tmp_path))
    text = " " * 38 + ("x" * 129 + " ") * 253
    assert tokenizer.min_token_count(text, 256) <= len(tokenizer.encode(text)) == 255
