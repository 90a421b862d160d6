"""A lower bound of the tokens in a text, computed from the bytes of the text.

A text that cannot fit into the context is therefore not tokenized at all.

Tokenizing 4 MB takes seconds of CPU, the bound takes milliseconds. Each token stands for some bytes
of the text. Every byte gets the weight 1 / (length of the longest token with this byte). The
weights within one token add up to 1 at most, so those of the whole text add up to no more than its
tokens. This holds only if no byte can vanish on its way into a token. If one can (a normalizer that
removes characters, white space between words, unknown characters that are left out or merged), the
tokenizer has no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmops.gateway.text.detokenizer import BYTE_OF

#: Bytes that are counted at once, between two comparisons with `enough`.
SLICE_BYTES = 2**18

#: The most tokens that a character can become: one per byte in UTF-8.
MAX_TOKENS_PER_CHARACTER = 4

#: The most bytes that a text can have per byte of its canonical composition (NFC).
MAX_COMPOSITION_RATIO = 4

#: Pre-tokenizers that remove no bytes.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"}
_SPACES = frozenset(byte for code in range(0x3001) if chr(code).isspace() for byte in chr(code).encode())


class TokenLowerBound:
    """The lower bound of one tokenizer."""

    def __init__(self, longest: NDArray[np.float64], *, composes: bool = False, absorbs: bool = False) -> None:
        """Create the bound.

        Args:
            longest: The bytes of the longest token with each byte value, infinite if the byte may
                vanish.
            composes: Texts are normalized to NFC first.
            absorbs: An added token takes the white space beside it.
        """
        self._weights = 1.0 / longest
        lightest = 0.0 if np.isinf(longest).any() else self._weights.min()
        if absorbs:
            self._weights[list(_SPACES)] = 0.0
        self._composed = (
            np.where(self._weights > 0, lightest / MAX_COMPOSITION_RATIO, 0.0) if composes else self._weights
        )

    def least(self, text: str, enough: int) -> int:
        """Return a lower bound of the tokens in `text`. Counting stops above `enough`."""
        weights = self._weights if text.isascii() else self._composed
        data, total = text.encode("utf-8", "replace"), 0.0
        for start in range(0, len(data), SLICE_BYTES):
            counts = np.bincount(
                np.frombuffer(data, np.uint8, min(SLICE_BYTES, len(data) - start), start), minlength=256
            )
            total += float(counts @ weights)
            if total > enough + 1:
                break
        # slightly less than counted, because the weights are rounded
        return int(total * (1 - 1e-9))


def bound_for_tokenizer(tokenizer: Tokenizer) -> TokenLowerBound | None:
    """Return the bound of a tokenizer, None if bytes may vanish in it."""
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
    # some vocabularies lack bytes that no text should have, and tokenizers drop these bytes
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
    """Return `keeps`, `composes` or `removes`: what a normalizer does to the number of bytes."""
    kind = spec["type"]
    if kind == "NFC":
        return "composes"
    # Llama's normalizer writes a space as the three bytes of ▁
    spaces = kind == "Replace" and spec["pattern"] == {"String": " "} and spec["content"] == "▁"
    return "keeps" if spaces or kind in ("Prepend", "ByteLevel") else "removes"


def _keeps(spec: Mapping[str, Any]) -> bool:
    removes = spec.get("behavior") == "Removed"
    return spec["type"] in _KEEPING and not removes


def _vocabulary(spec: Mapping[str, Any]) -> list[bytes] | None:
    """Return the bytes of the tokens, None if a byte of a text may be in none of them."""
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
        # any character may be unknown, and a space may be written as the three bytes of ▁
        single = (bytes([byte]) * size for byte in range(256) for size in (1, 4))
        return [*(text.encode() for text in texts), *single]
    return None


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    parts = [*_parts(spec.get("pre_tokenizer"), "pretokenizers"), *_parts(spec.get("normalizer"), "normalizers")]
    return any(part["type"] == "ByteLevel" for part in parts)
