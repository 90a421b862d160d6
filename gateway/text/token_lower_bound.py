"""A lower bound of the number of tokens in a text, computed from the bytes of the text.

With the bound, a text that cannot fit into the context is rejected without tokenizing it.
Tokenizing 4 MB takes seconds of CPU time, and computing the bound takes milliseconds.

Each token stands for some bytes of the text. Every byte has the weight 1 / (length of the longest
token that contains the byte). The weights within a token add up to at most 1, so the weights of the
whole text add up to at most the number of its tokens.

This holds only if no byte is dropped before tokens are formed. If a tokenizer may drop bytes (a
normalizer that removes characters, white space between words, unknown characters that are omitted
or merged), it has no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmops.gateway.text.detokenizer import BYTE_OF

#: Number of bytes that are counted between two comparisons with `enough`. Bounds the work after the
#: bound is above `enough`.
SLICE_BYTES = 2**18

#: Maximum number of tokens that a character can become: one per byte in UTF-8.
MAX_TOKENS_PER_CHARACTER = 4

#: Maximum number of bytes of a text per byte of its canonical composition (NFC).
MAX_COMPOSITION_RATIO = 4

#: Pre-tokenizers that drop no bytes, so that the bound holds for their tokenizers.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
_SPACES = frozenset(byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode())


class TokenLowerBound:
    """A lower bound of the number of tokens that a tokenizer makes of a text."""

    def __init__(self, longest: NDArray[np.float64], *, composes: bool = False, absorbs: bool = False) -> None:
        """Create the bound.

        Args:
            longest: For each byte value, the length of the longest token that contains it, in
                bytes. Infinite if the byte may be dropped.
            composes: True if texts are normalized to NFC first.
            absorbs: True if an added token includes the white space next to it.
        """
        self._weights = 1.0 / longest
        lightest = 0.0 if np.isinf(longest).any() else self._weights.min()
        if absorbs:
            self._weights[list(_SPACES)] = 0.0
        self._composed = (
            np.where(self._weights > 0, lightest / MAX_COMPOSITION_RATIO, 0.0) if composes else self._weights
        )

    def least(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens in `text`.

        Counting stops once the bound is above `enough`.
        """
        weights = self._weights if text.isascii() else self._composed
        data, total = text.encode("utf-8", "replace"), 0.0
        for start in range(0, len(data), SLICE_BYTES):
            counts = np.bincount(
                np.frombuffer(data, np.uint8, min(SLICE_BYTES, len(data) - start), start), minlength=256
            )
            total += float(counts @ weights)
            if total > enough + 1:
                break
        # The sum is reduced slightly, because the weights are rounded.
        return int(total * (1 - 1e-9))


def bound_for_tokenizer(tokenizer: Tokenizer) -> TokenLowerBound | None:
    """Return the lower bound of a tokenizer, or None if the tokenizer may drop bytes."""
    spec = json.loads(tokenizer.to_str())
    normalizers, added = _parts(spec.get("normalizer"), "normalizers"), spec.get("added_tokens") or []
    kinds = {_kind_of_normalizer(one) for one in normalizers}
    if "removes" in kinds or not all(map(_keeps, _parts(spec.get("pre_tokenizer"), "pretokenizers"))):
        return None
    vocabulary = _vocabulary(spec)
    if vocabulary is None:
        return None
    longest = _longest({*vocabulary, *(one["content"].encode() for one in added)})
    if not _is_byte_level(spec):
        longest[0x20] = longest.max()
    absorbs = any(one.get("lstrip") or one.get("rstrip") for one in added)
    return TokenLowerBound(longest, composes="composes" in kinds, absorbs=absorbs)


def _longest(tokens: set[bytes]) -> NDArray[np.float64]:
    longest = np.ones(256)
    for token in sorted(tokens, key=len):
        longest[list(token)] = len(token)
    # Some vocabularies lack bytes that valid text does not contain, and their tokenizers drop these
    # bytes.
    lacking = [byte for byte in range(256) if bytes([byte]) not in tokens]
    longest[lacking] = np.inf
    return longest


def _parts(spec: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for one in spec[name] for part in _parts(one, name)]
    return [spec]


def _kind_of_normalizer(spec: Mapping[str, Any]) -> str:
    """Return `keeps`, `composes` or `removes`, the effect of a normalizer on a text's bytes."""
    kind = spec["type"]
    if kind == "NFC":
        return "composes"
    # Llama's normalizer writes a space as ▁, which has three bytes.
    spaces = kind == "Replace" and spec["pattern"] == {"String": " "} and spec["content"] == "▁"
    return "keeps" if spaces or kind in ("Prepend", "ByteLevel") else "removes"


def _keeps(spec: Mapping[str, Any]) -> bool:
    removes = spec.get("behavior") == "Removed"
    return spec["type"] in _KEEPING and not removes


def _vocabulary(spec: Mapping[str, Any]) -> list[bytes] | None:
    """Return the bytes of all tokens, or None if no token may contain some byte of a text."""
    model = spec["model"]
    if model["type"] == "BPE":
        texts = list(model["vocab"])
    elif model["type"] == "Unigram":
        texts = [text for text, _ in model["vocab"]]
    else:
        return None
    if _is_byte_level(spec):
        return [bytes(BYTE_OF[char] for char in text if char in BYTE_OF) for text in texts]
    falls_back = model.get("byte_fallback") and {f"<0x{byte:02X}>" for byte in range(256)} <= set(texts)
    if falls_back or (model["type"] == "BPE" and model.get("unk_token") in texts and not model.get("fuse_unk")):
        # Any character may be unknown, and a space may be written as ▁, which has three bytes.
        single = (bytes([byte]) * size for byte in range(256) for size in (1, 4))
        return [*(text.encode() for text in texts), *single]
    return None


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    parts = [*_parts(spec.get("pre_tokenizer"), "pretokenizers"), *_parts(spec.get("normalizer"), "normalizers")]
    return any(part["type"] == "ByteLevel" for part in parts)
