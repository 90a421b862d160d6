"""CPU time of safety rules per KB of a prompt and per token of an answer, and without rules.

Goals for a filter of three patterns and a filter of four words: 50 µs per KB and 0.5 µs per token.
Without rules, at most 2 % of the time from the engine's message to the bytes of a token's event.
"""

import asyncio
import inspect
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from llmops.gateway.api.openai_chunks import ChatChunks
from llmops.gateway.generation import choice
from llmops.gateway.generation.choice import Choice
from llmops.gateway.interfaces import TokenBatch
from llmops.gateway.safety.rules import RuleFilter, rule_filter
from llmops.gateway.safety.stream_guard import RuleStage
from llmops.gateway.schemas.chat_request import ChatRequest
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.perf.lab.figures import Section

PATTERNS = [
    r"sk-[a-z0-9]{20,40}",
    r"\b\d{4}[- ]?\d{4}[- ]?\d{4}[- ]?\d{4}\b",
    r"(?:password|secret) is \S{4,40}",
]
WORDS = ["fool", "idiot", "moron", "stupid"]
#: English prose of about 16 KB in which no rule matches, in tokens of 4 characters.
TEXT = "The quick brown fox jumps over the lazy dog near the river bank and then goes home. " * 200
TOKENS = [TEXT[at : at + 4] for at in range(0, len(TEXT), 4)]
CONDITIONS = "Rules on prose without a match; tokens of 4 characters."


def measure(engine: Path, section: Section) -> None:
    """Add all figures of this benchmark to `section`. Only the tokenizer of `engine` is used."""
    filters = {
        "patterns": rule_filter("patterns", "secrets", PATTERNS, [], ignore_case=True),
        "words": rule_filter("words", "abuse", [], WORDS, ignore_case=True),
    }
    for name, rules in filters.items():
        seconds = _fastest(lambda rules=rules: asyncio.run(rules.judge(TEXT)))  # type: ignore[misc]
        section.add(f"prompt, {name}", 1e6 * seconds / (len(TEXT) / 1000), "µs/KB", 50.0)
        seconds = _fastest(lambda rules=rules: _stream(rules))  # type: ignore[misc]
        section.add(f"answer in hold, {name}", 1e6 * seconds / len(TOKENS), "µs/token", 0.5)
    with_check, without = _tokens_without_filters(engine / "tokenizer")
    section.add("token without filters, share of the check for them", 100 * (with_check / without - 1), "%", 2.0)


def _tokens_without_filters(tokenizer_dir: Path) -> tuple[float, float]:
    """Return the CPU seconds per token of the real code, and of the same code without filters.

    A token of an answer without filters, conversation, resumed stream or overflow costs only one
    more operation: the test for a filter. Runs of both alternate, and the fastest of many short
    rounds counts.
    """
    source = textwrap.dedent(inspect.getsource(Choice.feed))
    test = "return text if self.guard is None else self._filter(text)"
    assert test in source
    code: dict[str, object] = {}
    exec(source.replace(test, "return text"), vars(choice), code)
    unaware = type("UnawareChoice", (Choice,), {"feed": code["feed"]})
    tokenizer = TextTokenizer(tokenizer_dir)
    ids = tokenizer.encode(TEXT)[:500]
    chunks = ChatChunks(
        "chatcmpl-0", ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]}), 0, 1
    )
    fastest = [1.0, 1.0]
    for _ in range(400):
        for at, kind in enumerate((Choice, unaware)):
            one = kind(0, tokenizer.detokenizers.make(True), max_tokens=len(ids) + 1)
            begun = time.process_time()
            for token in ids:
                chunks.content(0, one.feed(TokenBatch(0, (token,))))
            fastest[at] = min(fastest[at], (time.process_time() - begun) / len(ids))
    return fastest[0], fastest[1]


def _stream(rules: RuleFilter) -> None:
    stage = RuleStage(rules, "hold")
    for token in TOKENS:
        stage.feed(token, final=False)


def _fastest(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of 300 runs."""
    runs = []
    for _ in range(300):
        begun = time.process_time()
        work()
        runs.append(time.process_time() - begun)
    return min(runs)
