"""Convert GGUF metadata to a `tokenizers` tokenizer.

transformers converts GGUF tokenizers by architecture and loses the pre-tokenizer (digits of SmolLM2
come out merged) and the special tokens. This conversion selects the pre-tokenizer by
`tokenizer.ggml.pre`, like llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmops.errors import CheckpointError
from llmops.tokenizer_files import check_added_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: ggml's token_type of a control token.
_CONTROL = 3
#: ggml's token_type of a token that a user added.
_USER_DEFINED = 4
_GPT2, _SPM = "gpt2", "llama"
#: Maximum sum of the squared token lengths. The search for merges takes time in proportion, some
#: seconds at this sum. Llama's 32,000 tokens have 1.2 million, and one token of 240,000 characters
#: would take half a minute.
_MAX_WORK = 200_000_000
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
#: Pre-tokenizers by `tokenizer.ggml.pre`: the regular expression before the bytes, True if digits
#: are split one by one, and True if whole words may skip merges.
_PRE_TOKENIZERS: dict[str, tuple[str | None, bool, bool]] = {
    "smollm": (None, True, False),
    "starcoder": (None, True, False),
    "gpt-2": (None, False, False),
    "llama-bpe": (_LLAMA3, False, True),
    "llama3": (_LLAMA3, False, True),
    "qwen2": (_QWEN2, False, False),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file's metadata.

    Raises:
        CheckpointError: The tokenizer is damaged, or of a kind that cannot be rebuilt exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in (_GPT2, _SPM):
        raise CheckpointError(
            f"The GGUF's tokenizer is of kind {kind!r}, and only {_GPT2} and {_SPM} can be read. Use the Hugging "
            "Face checkpoint."
        )
    try:
        tokenizer = _byte_level(metadata) if kind == _GPT2 else _sentencepiece(metadata)
        _add_special_tokens(tokenizer, metadata)
        _add_template(tokenizer, metadata, default=kind == _SPM)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises no subclass of Exception.
        raise CheckpointError(f"The GGUF's tokenizer is damaged ({error}); download the file again.") from error
    return tokenizer


def _require(metadata: Mapping[str, Any], *keys: str) -> None:
    missing = next((key for key in keys if f"tokenizer.ggml.{key}" not in metadata), None)
    if missing:
        raise CheckpointError(f"The GGUF has no tokenizer.ggml.{missing}; use the Hugging Face checkpoint.")


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"The GGUF's pre-tokenizer {pre!r} is unknown; supported are {', '.join(_PRE_TOKENIZERS)}. "
            "Use the Hugging Face checkpoint."
        )
    _require(metadata, "tokens", "merges")
    pattern, digits, ignore_merges = _PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a SentencePiece BPE tokenizer.

    Pairs are merged in the order of the merged tokens' scores. Unknown characters become bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    _require(metadata, "tokens", "scores")
    vocabulary = _vocabulary(metadata)
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges_by_score(vocabulary, metadata["tokenizer.ggml.scores"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    if sum(len(token) ** 2 for token in vocabulary) > _MAX_WORK:
        longest = max(map(len, vocabulary))
        raise CheckpointError(
            f"The GGUF's tokens are too long for a tokenizer (up to {longest:,} characters); download the file again."
        )
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(metadata["tokenizer.ggml.tokens"], types, strict=False))
    check_added_tokens([text for text, kind in pairs if kind in (_CONTROL, _USER_DEFINED)])
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == _USER_DEFINED])


def _add_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], default: bool) -> None:
    """Add the post-processor that surrounds a text with special tokens.

    Where the metadata does not say, a text begins with the begin token if `default` is True or the
    pre-tokenizer is Llama 3's.
    """
    from tokenizers.processors import TemplateProcessing

    bos, eos = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos"))
    tokens = metadata["tokenizer.ggml.tokens"]
    llama3 = metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    before = (
        [tokens[bos]] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", default or llama3) else []
    )
    after = [tokens[eos]] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if not before and not after:
        return
    named = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
    tokenizer.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=named)
