"""Answers by rule: what a prompt contains decides what the mock engine says. It notes every prompt that it gets.

So a client that acts on answers, such as a coding agent, can be led through a whole conversation.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from .script import Script

#: In the folder of a replay: a list of rules, each with `contains` and `answer`, read again for every prompt.
RULES = "rules.json"
#: In the same folder: one JSON text per line, the prompts in the order of their arrival.
PROMPTS = "prompts.jsonl"


class Replay(Script):
    """Says the answer of the first rule whose `contains` is part of the prompt, and the end of the text after it."""

    def __init__(self, folder: Path, tokenizer: Path, end: int) -> None:
        self._folder, self._end = folder, end
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        super().__init__(range(self._tokenizer.get_vocab_size()))

    def after(self, ids: Sequence[int]) -> Iterator[int]:
        prompt = self._tokenizer.decode(ids, skip_special_tokens=False)
        with open(self._folder / PROMPTS, "a") as prompts:
            prompts.write(json.dumps(prompt) + "\n")
        rules = json.loads((self._folder / RULES).read_text())
        answer = next((rule["answer"] for rule in rules if rule["contains"] in prompt), "")
        return self._answer(answer)

    def _answer(self, text: str) -> Iterator[int]:
        yield from self._tokenizer.encode(text, add_special_tokens=False).ids
        while True:
            yield self._end
