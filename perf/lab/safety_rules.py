"""CPU that safety rules cost per KB of prompt and per token of an answer.

Goals: 50 µs per KB and 0.5 µs per token, for a filter of three patterns and one of four words.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from llmops.gateway.safety.rules import RuleFilter, rule_filter
from llmops.gateway.safety.stream_guard import RuleStage
from llmops.perf.lab.figures import Section

PATTERNS = [
    r"sk-[a-z0-9]{20,40}",
    r"\b\d{4}[- ]?\d{4}[- ]?\d{4}[- ]?\d{4}\b",
    r"(?:password|secret) is \S{4,40}",
]
WORDS = ["fool", "idiot", "moron", "stupid"]
#: English prose of about 16 KB without a match, in tokens of 4 characters.
TEXT = "The quick brown fox jumps over the lazy dog near the river bank and then goes home. " * 200
TOKENS = [TEXT[at : at + 4] for at in range(0, len(TEXT), 4)]


def measure(engine: Path) -> Section:
    """Return all figures of this benchmark. It needs no engine."""
    section = Section("Safety rules", "Rules on prose without a match; tokens of 4 characters.")
    with section:
        filters = {
            "patterns": rule_filter("patterns", "secrets", PATTERNS, [], ignore_case=True),
            "words": rule_filter("words", "abuse", [], WORDS, ignore_case=True),
        }
        for name, rules in filters.items():
            seconds = _fastest(lambda rules=rules: asyncio.run(rules.judge(TEXT)))  # type: ignore[misc]
            section.add(f"prompt, {name}", 1e6 * seconds / (len(TEXT) / 1000), "µs/KB", 50.0)
            seconds = _fastest(lambda rules=rules: _stream(rules))  # type: ignore[misc]
            section.add(f"answer in hold, {name}", 1e6 * seconds / len(TOKENS), "µs/token", 0.5)
    return section


def _stream(rules: RuleFilter) -> None:
    stage = RuleStage(rules, "hold")
    for token in TOKENS:
        stage.feed(token, final=False)


def _fastest(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of 20 runs."""
    runs = []
    for _ in range(20):
        begun = time.process_time()
        work()
        runs.append(time.process_time() - begun)
    return min(runs)
