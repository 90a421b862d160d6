"""The budget of CPU time and characters for a rendering of a chat template.

The budget is kept per thread, so that the checks which the sandbox inserts into a template need no
reference to the rendering.
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

#: Maximum number of characters that all steps of a rendering may write or copy together: many times
#: the largest prompt.
MAX_TOTAL_CHARACTERS = 1 << 27

#: Maximum number of characters of a value: twice the default of `limits.prompt_bytes`. The slowest
#: steps, such as the method `upper`, hold the GIL for a quarter of a second with such a text.
MAX_VALUE_CHARACTERS = 1 << 23

#: Maximum number of times that a step may pad, indent or repeat a text. Bounds the work of a step
#: that makes no large value.
MAX_REPEATS = 1 << 20

#: Maximum CPU time that counts between two checks, in seconds. A template is not charged for more,
#: because then the host was stopped.
MAX_CLOCK_STEP = 0.25

#: Number of characters that an element of a container counts for, in addition to its text.
#: Approximates the memory of an object.
ELEMENT_SIZE = 32
#: Number of characters that an element's slot counts for when its container is copied: a pointer.
_SLOT_SIZE = 8


class TemplateTimeoutError(jinja2.TemplateError):
    """An error for a rendering that exceeded its CPU time."""


class _RenderBudget(threading.local):
    time = CpuBudget(float("inf"), MAX_CLOCK_STEP, thread_time)
    characters = MAX_TOTAL_CHARACTERS


_budget = _RenderBudget()


def within_budget(seconds: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` with a new budget and return the result.

    Args:
        seconds: The CPU seconds of the budget, which also has MAX_TOTAL_CHARACTERS characters.
        work: The function to call.
        args: Positional arguments of `work`.
        kwargs: Keyword arguments of `work`.
    """
    previous = _budget.time, _budget.characters
    _budget.time, _budget.characters = CpuBudget(seconds, MAX_CLOCK_STEP, thread_time), MAX_TOTAL_CHARACTERS
    try:
        return work(*args, **kwargs)
    finally:
        _budget.time, _budget.characters = previous


def check_time() -> None:
    """Raise TemplateTimeoutError if the rendering has used up its CPU time."""
    if _budget.time.is_over():
        raise TemplateTimeoutError("the rendering takes too long")


@jinja2.pass_context
def check_loop_time(context: Any, value: None) -> None:
    """Check the time, as a filter in the body of a loop.

    A filter without the context would be computed once, when the template is compiled.
    """
    check_time()


def spend_characters(characters: int) -> None:
    """Count characters that the rendering wrote.

    Raises:
        SecurityError: The rendering has written more characters than its budget allows.
    """
    _budget.characters -= characters
    if _budget.characters < 0:
        raise SecurityError("the rendered text is too long")


def check_result_size(characters: int) -> None:
    """Check the size of a value before the value is created.

    Raises:
        SecurityError: The value would be too long.
    """
    if characters > min(MAX_VALUE_CHARACTERS, _budget.characters):
        raise SecurityError("a text or list of the template is too long")


def checked_count(count: Any) -> int:
    """Return `count`, a width or number of repetitions, as an integer, or 0 for other values.

    Raises:
        SecurityError: The number is too large.
    """
    if not isinstance(count, int | float):
        return 0
    if abs(count) > MAX_REPEATS:
        raise SecurityError("a width or count in the template is too large")
    return int(count)


def charge_value(value: Any) -> Any:
    """Count the characters of a text, or the elements of a container, and return `value`."""
    kind = type(value)
    if kind is str:
        spend_characters(len(value))
    elif kind is list or kind is tuple:
        spend_characters(_SLOT_SIZE * len(value))
    elif kind is dict:
        spend_characters(2 * ELEMENT_SIZE * len(value))
    elif isinstance(value, str):
        spend_characters(len(value))
    return value


def text_size(value: Any) -> int:
    """Return the approximate number of characters that `value` has as text.

    A list that another list contains several times counts each time, because its text is written
    each time. A template with a few variables can build a list of billions of elements in this way.

    Raises:
        SecurityError: The text would be too long.
    """
    return len(value) if isinstance(value, str) else _nested_size(value, {})


def _nested_size(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str):
        return ELEMENT_SIZE + len(value)
    parts = _container_parts(value)
    if parts is None:
        return ELEMENT_SIZE + (value.bit_length() // 3 if isinstance(value, int) else 0)
    if id(value) not in known:
        _check_value_size(len(parts) * ELEMENT_SIZE)
        # Ends the recursion for a list that contains itself.
        known[id(value)] = MAX_VALUE_CHARACTERS
        size = ELEMENT_SIZE + sum(_nested_size(part, known) for part in parts)
        _check_value_size(size)
        known[id(value)] = size
    return known[id(value)]


def _check_value_size(characters: int) -> None:
    if characters > MAX_VALUE_CHARACTERS:
        raise SecurityError("a text or list of the template is too long")


def _container_parts(value: Any) -> Sequence[Any] | None:
    """Return the elements of a container, or None for other values."""
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

    Raises:
        SecurityError: The value is too large.
    """
    if not isinstance(value, str):
        text_size(value)
    return value


def output_value(value: Any) -> Any:
    """Return a value that the template writes, and count the characters of other values than text.

    The characters of a text were counted when the text was created.
    """
    if not isinstance(value, str):
        spend_characters(text_size(value))
    return value


def timed_elements(value: Any) -> Any:
    """Return an iterator over `value` for a filter, which checks before each item that CPU time is left.

    Empty values are returned unchanged, because filters take None, for example, for no elements.
    The characters of a text count as the elements of a list, which the filter may create.

    Raises:
        SecurityError: The text is too long.
        TemplateTimeoutError: The rendering has used up its CPU time.
    """
    if isinstance(value, str):
        check_result_size(ELEMENT_SIZE * len(value))
    return timed_iteration(value) if value else value


def timed_iteration(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, and check before each item that CPU time is left.

    Raises:
        TemplateTimeoutError: The rendering has used up its CPU time.
    """
    for item in items:
        check_time()
        yield item


def join_texts(texts: Iterable[str]) -> str:
    """Join `texts`, count the characters, and return the result.

    Raises:
        SecurityError: The result would be too long. It is not created.
    """
    parts = texts if isinstance(texts, list | tuple) else list(texts)
    size = sum(map(len, parts))
    check_result_size(size)
    spend_characters(size)
    return "".join(parts)
