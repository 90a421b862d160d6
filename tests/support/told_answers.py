"""A scripted Triton with an answer of its own to each prompt, and the rest of it to a prompt that has a part of it."""

import random

from tests.support.scripted_triton import ScriptedTriton, Step

#: The token that ends a text.
END = 0
_WORDS = ("Paris", "is", "the", "capital", "of", "France", "你好", "🙂")


class ToldAnswers:
    """The answers by prompt. `wait` seconds pass before each step."""

    def __init__(self, card: dict, tokenizer, tokens: int = 40, wait: float = 0.01) -> None:
        self._tokenizer, self._tokens, self.wait = tokenizer, tokens, wait
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self.triton = ScriptedTriton(card, self._script)

    def text(self, question: str) -> str:
        """Return the whole answer to a question."""
        return self._tokenizer.decode(self._ids(question))

    def _ids(self, question: str) -> list[int]:
        chance = random.Random(question)
        text = " ".join(chance.choice(_WORDS) for _ in range(99))
        return self._tokenizer.encode(text)[: self._tokens]

    def _script(self, tensors: dict) -> list[Step]:
        ids = tuple(tensors["input_ids"])
        prompt = next((one for one in self._answers if ids[: len(one)] == one), None)
        if prompt is None:
            question = self._tokenizer.decode(list(ids)).partition("<user>")[2].partition("\n")[0]
            prompt = ids
            self._answers[prompt] = self._ids(question)
        rest = self._answers[prompt][len(ids) - len(prompt) :]
        return [*(Step((token,), wait=self.wait) for token in rest), Step((END,)), Step(final=True)]
