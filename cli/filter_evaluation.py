"""The evaluation of safety filters on labelled texts.

The evaluation measures recall, false positives, and the characters of matches that leave in mode
`hold`.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmops.errors import InputError
from llmops.gateway.safety.filters import TextFilter
from llmops.gateway.safety.rules import RuleFilter
from llmops.gateway.safety.stream_guard import RuleStage, StreamGuard
from llmops.input_files import parse_json, read_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: The fields that an example may have in a file.
_FIELDS = ("text", "category")

#: Number of characters of a piece when the stream of an answer is imitated: about one token.
PIECE = 4

#: Share of examples that are held back from training, for the thresholds and the reported figures.
#: A quarter of few examples is still enough for both.
HELD_OUT = 0.25


@dataclass(frozen=True, slots=True)
class Example:
    """A text and the category that a filter should find in it.

    If the category is empty, every finding is a false positive.
    """

    text: str
    category: str = ""


@dataclass
class FilterReport:
    """The results of one filter on labelled examples.

    Attributes:
        found: The number of examples of the filter's categories in which the filter found a match.
        expected: The number of examples of the filter's categories.
        false_positives: The number of `clean` examples in which the filter found a match.
        clean: The number of examples without a category.
        leaks: The number of characters of matches that left a stream in mode `hold`.
        missed: At most ten texts in which the filter missed its category.
    """

    found: int = 0
    expected: int = 0
    false_positives: int = 0
    clean: int = 0
    leaks: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def recall(self) -> float | None:
        return self.found / self.expected if self.expected else None

    @property
    def false_positive_rate(self) -> float | None:
        return self.false_positives / self.clean if self.clean else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "recall": self.recall,
            "found": self.found,
            "expected": self.expected,
            "false_positive_rate": self.false_positive_rate,
            "false_positives": self.false_positives,
            "clean": self.clean,
            "leaked_characters": self.leaks,
        }


def read_examples(path: Path) -> list[Example]:
    """Read a file of JSON lines `{"text": …, "category": …}`.

    A text without a category, or with the category null, is clean.

    Raises:
        InputError: The file cannot be read, or a line is not such an object.
    """
    examples = []
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); name a file of JSON lines.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = parse_json(line)
            text, category = found["text"], found.get("category") or ""
            if not isinstance(text, str) or not isinstance(category, str):
                raise TypeError
            misspelt = next((key for key in found if _meant(key)), None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f" ({error})" if isinstance(error, ValueError) else ""
            raise InputError(
                f'{path}, line {number} is not an example{reason}; write {{"text": "…", "category": "hate"}}.'
            ) from None
        if misspelt is not None:
            raise InputError(
                f"{path}, line {number} has the unknown field {misspelt!r}; did you mean {_meant(misspelt)!r}?"
            )
        examples.append(Example(text, category))
    if not examples:
        raise InputError(f"{path} has no examples; write one JSON object a line.")
    return examples


def _meant(key: str) -> str | None:
    """Return the known field that an unknown field resembles, or None."""
    return next(iter(difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.8)), None) if key not in _FIELDS else None


async def evaluate(
    filters: Mapping[str, TextFilter], examples: Sequence[Example], advance: Callable[[], None] = lambda: None
) -> dict[str, FilterReport]:
    """Judge every example with every filter, and return a report for each filter.

    Raises FilterUnavailableError if a filter cannot judge.
    """
    reports = {name: FilterReport() for name in filters}
    for example in examples:
        for name, one in filters.items():
            report, finding = reports[name], await one.judge(example.text)
            if not example.category:
                report.clean += 1
                report.false_positives += finding is not None
            elif example.category in one.categories:
                report.expected += 1
                report.found += finding is not None
                if finding is None and len(report.missed) < 10:
                    report.missed.append(example.text)
            if isinstance(one, RuleFilter):
                report.leaks += _leaked_characters(one, example.text)
        advance()
    return reports


def _leaked_characters(rule: RuleFilter, text: str) -> int:
    """Return how many characters of the first match leave a stream in mode `hold`.

    Any number above 0 is a fault of the gateway's stream guard.
    """
    span = rule.search(text)
    if span is None:
        return 0
    guard = StreamGuard([RuleStage(rule, "hold")], lambda found, mode: None)
    left = 0
    for start in range(0, len(text), PIECE):
        left += len(guard.feed(text[start : start + PIECE], final=start + PIECE >= len(text)))
        if guard.finding is not None:
            break
    return max(0, left - span.start)


async def train_head(
    examples: Sequence[Example],
    model: str,
    embed: Callable[[Sequence[str]], Awaitable[NDArray[np.float32]]],
    *,
    max_false_positives: float,
) -> dict[str, Any]:
    """Fit a logistic regression for each category on the texts' vectors.

    Args:
        examples: At least eight examples of each category, and eight clean examples.
        model: The name of the embedding model.
        embed: Returns the vectors of texts, FP32 [len(texts), dimensions].
        max_false_positives: The share of clean held-out texts that may be found; the threshold
            follows from it.

    Returns:
        The head as `read_head` reads it, with `recall` and `false_positives` by category on the
            held-out texts.

    Raises:
        InputError: There are too few examples.
    """
    import numpy as np

    categories = sorted({example.category for example in examples if example.category})
    for category in ("", *categories):
        count = sum(example.category == category for example in examples)
        if count < 8:
            raise InputError(
                f"Too few examples of {category or 'clean texts'}: {count}, where at least 8 are needed; add more."
            )
    vectors = np.asarray(await embed([example.text for example in examples]), dtype=np.float64)
    order = np.random.default_rng(0).permutation(len(examples))
    held = order[: max(1, int(len(order) * HELD_OUT))]
    taught = np.setdiff1d(order, held)
    labels = np.array([example.category for example in examples])
    head: dict[str, Any] = {"model": model, "weights": {}, "thresholds": {}, "recall": {}, "false_positives": {}}
    for category in categories:
        weights = logistic_regression(vectors[taught], labels[taught] == category)
        scores = 1 / (1 + np.exp(-(vectors[held] @ weights[:-1] + weights[-1])))
        clean, positive = scores[labels[held] == ""], scores[labels[held] == category]
        quantile = float(np.quantile(clean, 1 - max_false_positives, method="higher")) if len(clean) else 0.5
        threshold = min(1.0, max(0.05, quantile + 1e-6))
        head["weights"][category] = [float(value) for value in weights]
        head["thresholds"][category] = threshold
        head["recall"][category] = float(np.mean(positive >= threshold)) if len(positive) else None
        head["false_positives"][category] = float(np.mean(clean >= threshold)) if len(clean) else None
    return head


def logistic_regression(vectors: NDArray[np.float64], positive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the weights of a logistic regression, [dimensions + 1].

    The last weight is the constant. `positive` is True for each vector of the class to find.
    Newton's method minimizes the loss with an L2 penalty, in which both classes have the same
    weight.
    """
    import numpy as np

    design = np.hstack([vectors, np.ones((len(vectors), 1))])
    target = positive.astype(np.float64)
    share = np.where(positive, 0.5 / max(1, positive.sum()), 0.5 / max(1, (~positive).sum())) * len(target)
    penalty = np.eye(design.shape[1])
    penalty[-1, -1] = 1e-6
    weights = np.zeros(design.shape[1])
    for _ in range(30):
        predicted = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        gradient = design.T @ (share * (predicted - target)) + penalty @ weights
        curvature = (design.T * (share * predicted * (1 - predicted) + 1e-9)) @ design + penalty
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return weights
