"""What one rendering of a chat template may use: seconds of CPU, and characters written or copied.

Both are counted per thread, so the code that counts needs no reference to its rendering.
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

#: characters that one rendering may write or copy, all its steps together
MAX_TOTAL_CHARACTERS = 1 << 27
#: characters of one value
MAX_VALUE_CHARACTERS = 1 << 25
#: times that a text is padded, indented or repeated
MAX_REPEATS = 1 << 20
#: what the time between two looks counts at most (s)
MAX_CLOCK_STEP = 0.25
# what an element of a list or mapping counts, besides its text
_ELEMENT = 32
_SLOT = 8


class TemplateTimeoutError(jinja2.TemplateError):
    """The template took longer than it may."""


class _RenderBudget(threading.local):
    time = CpuBudget(float("inf"), MAX_CLOCK_STEP, thread_time)
    characters = MAX_TOTAL_CHARACTERS


_budget = _RenderBudget()


def within_budget(seconds: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`; whatever it renders on this thread is stopped after `seconds` of CPU or MAX_TOTAL_CHARACTERS."""
    before = _budget.time, _budget.characters
    _budget.time, _budget.characters = CpuBudget(seconds, MAX_CLOCK_STEP, thread_time), MAX_TOTAL_CHARACTERS
    try:
        return work(*args, **kwargs)
    finally:
        _budget.time, _budget.characters = before


def check_time() -> None:
    """Raises TemplateTimeoutError when the rendering has no time left."""
    if _budget.time.is_over():
        raise TemplateTimeoutError("it takes too long")


def spend_characters(characters: int) -> None:
    """Count so many characters. Raises SecurityError when the rendering has none left."""
    _budget.characters -= characters
    if _budget.characters < 0:
        raise SecurityError("the text it produces is too long")


def check_result_size(characters: int) -> None:
    """Refuse, before it is made, a value that would be too long."""
    if characters > min(MAX_VALUE_CHARACTERS, _budget.characters):
        raise _too_long()


def _too_long() -> SecurityError:
    return SecurityError("a text or list it produces is too long")


def checked_count(count: Any) -> int:
    """`count` as a width or number of repetitions. Raises SecurityError when it is too large."""
    if isinstance(count, int | float) and abs(count) > MAX_REPEATS:
        raise SecurityError("a width or count is too large")
    return int(count) if isinstance(count, int | float) else 0


def charge_value(value: Any) -> Any:
    """`value`, its text or slots counted."""
    kind = type(value)
    if kind is str:
        spend_characters(len(value))
    elif kind is list or kind is tuple:
        spend_characters(_SLOT * len(value))
    elif isinstance(value, str):
        spend_characters(len(value))
    return value


def text_size(value: Any) -> int:
    """Characters that a value has as text, roughly. Raises SecurityError when it is too long.

    Lists that hold each other are counted as often as they would be written: a few names can hold billions of elements.
    """
    return len(value) if isinstance(value, str) else _size(value, {})


def _size(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str):
        return _ELEMENT + len(value)
    parts = _parts(value)
    if parts is None:
        return _ELEMENT + (value.bit_length() // 3 if isinstance(value, int) else 0)
    if id(value) not in known:
        if len(parts) * _ELEMENT > MAX_VALUE_CHARACTERS:
            raise _too_long()
        known[id(value)] = MAX_VALUE_CHARACTERS  # for a list that holds itself
        size = _ELEMENT + sum(_size(part, known) for part in parts)
        if size > MAX_VALUE_CHARACTERS:
            raise _too_long()
        known[id(value)] = size
    return known[id(value)]


def _parts(value: Any) -> Sequence[Any] | None:
    """What a container holds; None for anything else."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    if isinstance(value, ItemsView):
        return [part for pair in value for part in pair]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, set | frozenset | KeysView | ValuesView) else None


def checked_text(value: Any) -> Any:
    """`value`, which is about to become text."""
    if not isinstance(value, str):
        text_size(value)
    return value


def timed_iteration(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        check_time()
        yield item


def joined(pieces: Iterable[str]) -> str:
    """What the pieces of a template's output make together."""
    parts = pieces if isinstance(pieces, list) else list(pieces)
    size = sum(map(len, parts))
    check_result_size(size)
    spend_characters(size)
    return "".join(parts)
