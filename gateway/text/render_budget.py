"""The CPU time and the characters that one rendering of a chat template may use.

Both are counted per thread, so the checks that the sandbox puts into a template need no reference
to the rendering that they belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from time import thread_time
from typing import Any, ParamSpec, TypeVar

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from llmops.clocks import CpuBudget

P = ParamSpec("P")
T = TypeVar("T")

#: Characters that one rendering may write or copy in all its steps together: many times the largest
#: prompt.
MAX_TOTAL_CHARACTERS = 1 << 27

#: Characters of one value: several times the largest prompt.
MAX_VALUE_CHARACTERS = 1 << 25

#: Times that one step may pad, indent or repeat a text.
MAX_REPEATS = 1 << 20

#: CPU seconds that one interval between two checks may count. A host that stops for longer is not
#: the template's fault.
MAX_CLOCK_STEP = 0.25

#: Characters that an element of a container counts for besides its text, and that its slot counts
#: for when copied.
_ELEMENT_SIZE = 32
_SLOT_SIZE = 8


class TemplateTimeoutError(jinja2.TemplateError):
    """An error for a template that took longer than its budget."""


class _RenderBudget(threading.local):
    time = CpuBudget(float("inf"), MAX_CLOCK_STEP, thread_time)
    characters = MAX_TOTAL_CHARACTERS


_budget = _RenderBudget()


def within_budget(seconds: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` with a budget of its own: `seconds` of CPU and MAX_TOTAL_CHARACTERS.

    Return its result.
    """
    previous = _budget.time, _budget.characters
    _budget.time, _budget.characters = CpuBudget(seconds, MAX_CLOCK_STEP, thread_time), MAX_TOTAL_CHARACTERS
    try:
        return work(*args, **kwargs)
    finally:
        _budget.time, _budget.characters = previous


def check_time() -> None:
    """Raise TemplateTimeoutError if the rendering has no CPU time left."""
    if _budget.time.is_over():
        raise TemplateTimeoutError("it takes too long")


def spend_characters(characters: int) -> None:
    """Count characters that were written. Raise SecurityError if the rendering has none left."""
    _budget.characters -= characters
    if _budget.characters < 0:
        raise SecurityError("the text it produces is too long")


def check_result_size(characters: int) -> None:
    """Raise SecurityError if a value of this size, which is about to be made, would be too long."""
    if characters > min(MAX_VALUE_CHARACTERS, _budget.characters):
        raise SecurityError("a text or list it produces is too long")


def checked_count(count: Any) -> int:
    """Return `count` as a width or number of repetitions, 0 for other values.

    Raise SecurityError if it is too large.
    """
    if not isinstance(count, int | float):
        return 0
    if abs(count) > MAX_REPEATS:
        raise SecurityError("a width or count is too large")
    return int(count)


def charge_value(value: Any) -> Any:
    """Return `value` and count its characters or slots."""
    kind = type(value)
    if kind is str:
        spend_characters(len(value))
    elif kind is list or kind is tuple:
        spend_characters(_SLOT_SIZE * len(value))
    elif isinstance(value, str):
        spend_characters(len(value))
    return value


def text_size(value: Any) -> int:
    """Return the approximate number of characters of `value` as text.

    Raise SecurityError if that is too long.

    A list that stands in another one several times counts each time, as it would be written each
    time: a few names can hold billions of elements.
    """
    return len(value) if isinstance(value, str) else _nested_size(value, {})


def _nested_size(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str):
        return _ELEMENT_SIZE + len(value)
    parts = _container_parts(value)
    if parts is None:
        return _ELEMENT_SIZE + (value.bit_length() // 3 if isinstance(value, int) else 0)
    if id(value) not in known:
        _check_value_size(len(parts) * _ELEMENT_SIZE)
        known[id(value)] = MAX_VALUE_CHARACTERS  # for a list that holds itself
        size = _ELEMENT_SIZE + sum(_nested_size(part, known) for part in parts)
        _check_value_size(size)
        known[id(value)] = size
    return known[id(value)]


def _check_value_size(characters: int) -> None:
    if characters > MAX_VALUE_CHARACTERS:
        raise SecurityError("a text or list it produces is too long")


def _container_parts(value: Any) -> Sequence[Any] | None:
    """Return the elements of a container, None for anything else."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    if isinstance(value, ItemsView):
        return [part for pair in value for part in pair]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, set | frozenset | KeysView | ValuesView) else None


def checked_value(value: Any) -> Any:
    """Return `value`, which is about to be written, compared or looked up.

    Raise SecurityError if it is too large.
    """
    if not isinstance(value, str):
        text_size(value)
    return value


def output_value(value: Any) -> Any:
    """Return a value that the template writes.

    Text was counted when it was made; other values become text here.
    """
    if not isinstance(value, str):
        spend_characters(text_size(value))
    return value


def timed_iteration(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items` and check the time before each. Raise TemplateTimeoutError if none is left."""
    for item in items:
        check_time()
        yield item


def join_texts(texts: Iterable[str]) -> str:
    """Return `texts` as one text, which is counted.

    Raise SecurityError before it is made if it would be too long.
    """
    parts = texts if isinstance(texts, list | tuple) else list(texts)
    size = sum(map(len, parts))
    check_result_size(size)
    spend_characters(size)
    return "".join(parts)
