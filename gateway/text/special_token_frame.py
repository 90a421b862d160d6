"""The special tokens that a tokenizer puts around a text, or around two that are read together."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class SpecialTokenFrame:
    """Read off an example, so that it holds for every kind of tokenizer. The texts come tokenised, without any."""

    def __init__(self, tokenizer: Tokenizer, texts: int) -> None:
        """`texts`: one or two."""
        example = tokenizer.encode(*["a"] * texts)
        # before each text, and after the last: (id, type) of every special token
        self._around: list[list[tuple[int, int]]] = [[]]
        # of a text's own tokens
        self._types: list[int] = []
        for token, kind, text in zip(example.ids, example.type_ids, example.sequence_ids, strict=True):
            if text is None:
                self._around[-1].append((token, kind))
            elif text == len(self._types):
                self._types.append(kind)
                self._around.append([])
        self.size = sum(map(len, self._around))

    def ids(self, *texts: Sequence[int]) -> list[int]:
        ids = [token for token, _ in self._around[0]]
        for text, after in zip(texts, self._around[1:], strict=True):
            ids += text
            ids += [token for token, _ in after]
        return ids

    def types(self, *texts: Sequence[int]) -> list[int]:
        """For each of `ids` to which text it belongs, in the model's own numbers (`token_type_ids`)."""
        types = [kind for _, kind in self._around[0]]
        for text, own, after in zip(texts, self._types, self._around[1:], strict=True):
            types += [own] * len(text)
            types += [kind for _, kind in after]
        return types
