"""Conversion of words to token ids, and to TensorRT-LLM's word lists and biases."""

from __future__ import annotations

from collections.abc import Sequence

import llmops_contract as contract
import numpy as np
from tokenizers import Tokenizer


def word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the token ids that each word has in the middle of a text, without special tokens."""
    return [ids for word in words if word and (ids := tokenizer.encode(word, add_special_tokens=False).ids)]


def encode_word_list(words: Sequence[Sequence[int]]) -> np.ndarray:
    """Encode a list of words as INT32 [1, 2, n].

    Row 0 has the ids of all words. Row 1 has the offset of the end of each word, padded with -1. An
    empty list is [[0], [-1]].
    """
    flat = [token for word in words for token in word] or [0]
    ends = list(np.cumsum([len(word) for word in words], dtype=int)) if words else []
    ends += [-1] * (len(flat) - len(ends))
    return np.array([[flat, ends]], dtype=np.int32)


def embedding_bias(tokenizer: Tokenizer, words: Sequence[str], weights: Sequence[float], vocab_size: int) -> np.ndarray:
    """Return the bias of words, FP32 [1, vocab_size], or [1, 0] without words.

    Raises:
        ValueError: The numbers of words and weights differ.
    """
    if len(words) != len(weights):
        raise ValueError(
            f"{contract.BIAS_WEIGHTS}: {len(weights)} weights for {len(words)} {contract.BIAS_WORDS}; send "
            "one weight for each word"
        )
    if not words:
        return np.zeros((1, 0), dtype=np.float32)
    bias = np.zeros((1, vocab_size), dtype=np.float32)
    for word, weight in zip(words, weights, strict=True):
        for token in tokenizer.encode(word, add_special_tokens=False).ids:
            bias[0, token] += weight
    return bias
