"""Golden prompts: questions with known answers, from the package or a file of the operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmops.errors import InputError
from llmops.gateway.safety.rules import compile_linear
from llmops.input_files import MALFORMED, parse_json, read_bounded

#: Maximum size of a file of prompts in bytes. A sweep with more prompts would be an evaluation.
MAX_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class GoldenPrompt:
    """A question, and the pattern of right answers.

    Attributes:
        name: Id of the prompt.
        prompt: The question, as a user writes it.
        expect: Regular expression (of RE2 in a file) that is found in every right answer, without
            regard to case. With None, the answers of replicas are only compared with each other.
        max_tokens: Maximum number of tokens of an answer.
    """

    name: str
    prompt: str
    expect: Any
    max_tokens: int = 24

    def data(self) -> dict[str, Any]:
        """Return the prompt in the form of a file's line."""
        expect = None if self.expect is None else self.expect.pattern
        return {"id": self.name, "prompt": self.prompt, "expect": expect, "max_tokens": self.max_tokens}

    def score(self, answer: str) -> float | None:
        """Return 1 for a right answer and 0 for a wrong answer, or None if `expect` is None."""
        return None if self.expect is None else float(self.expect.search(answer) is not None)


def load_golden_prompts(path: Path | None) -> Sequence[GoldenPrompt]:
    """Return the prompts in a JSONL file, or the prompts of the package if `path` is None.

    The package's own patterns need no RE2. In a file, Python's matcher could take minutes for an
    answer.

    Raises:
        InputError: The file cannot be read, or a line is not a golden prompt.
        MissingDependencyError: A file has patterns, and RE2 is not installed.
    """
    if path is None:
        own = files(__package__).joinpath("golden_prompts.jsonl").read_text()
        return _parse(own, "golden_prompts.jsonl", lambda expect: re.compile(expect, re.IGNORECASE))
    try:
        text = read_bounded(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"The golden prompts {path} cannot be read ({reason}); name another file.") from error
    return _parse(text, str(path), lambda expect: compile_linear(f"The golden prompts {path} need", expect, True))


def _parse(text: str, source: str, compiled: Callable[[str], Any]) -> Sequence[GoldenPrompt]:
    prompts: dict[str, GoldenPrompt] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line)
            expect = data.get("expect")
            pattern = None if expect is None else compiled(expect)
            name, tokens = str(data.get("id", number)), data.get("max_tokens", 24)
            if not isinstance(data["prompt"], str) or not isinstance(tokens, int) or not 0 < tokens <= 1024:
                raise TypeError
            prompts[name] = GoldenPrompt(name, data["prompt"], pattern, tokens)
        except MALFORMED as error:
            raise InputError(
                f'{source}, line {number} is not a golden prompt; write {{"id": "capital", "prompt": "What is the '
                'capital of France?", "expect": "paris"}, with a regular expression of '
                "RE2 in `expect` and at most 1024 `max_tokens`."
            ) from error
    if not prompts:
        raise InputError(f"{source} has no golden prompts; write one JSON object per line.")
    return list(prompts.values())
