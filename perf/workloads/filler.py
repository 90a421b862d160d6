"""Prompt text of a set number of tokens.

The text is words that are one token each in common vocabularies, or random token ids.
"""

import random
from typing import Any, Protocol

# With its leading space, each word is one token of GPT-2, Llama 3, Qwen, Mistral and SmolLM2.
WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over
man me even most made after also did many before must through back years where much your way well down should
because each just those people how too little state good very make world still own see men work long get here
between both life being under never day same another know while last might us great old year off come since
against go came right used take three
""".split()  # noqa: SIM905


class Filler(Protocol):
    """A maker of prompts of a set number of tokens, which are text or token ids."""

    def make(self, rng: random.Random, tokens: int) -> Any: ...

    def join(self, *parts: Any) -> Any: ...


class WordFiller:
    """A filler of random common words.

    Each word is one token. A tokenizer may add tokens at the start of a prompt.
    """

    def make(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(WORDS, k=tokens))

    def join(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)


class TokenIdFiller:
    """A filler of random token ids below `vocab_size`, for clients that send token ids."""

    def __init__(self, vocab_size: int = 1000) -> None:
        # The first hundred ids are often special tokens.
        self._ids = range(min(100, vocab_size - 1), vocab_size)

    def make(self, rng: random.Random, tokens: int) -> list[int]:
        return rng.choices(self._ids, k=tokens)

    def join(self, *parts: list[int]) -> list[int]:
        return [token for part in parts for token in part]
