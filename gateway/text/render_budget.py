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

#: Maximum number of bytes that all steps of a rendering may write or copy together: many times the
#: largest prompt. Bounds the memory of a rendering, which may keep all its values.
MAX_TOTAL_BYTES = 1 << 27

#: Maximum number of characters of a value: twice the default of `limits.prompt_bytes`. A step that
#: copies such a text holds the GIL for 10 to 50 ms.
MAX_VALUE_CHARACTERS = 1 << 23

#: Maximum number of times that a step may pad, indent or repeat a text. Bounds the work of a step
#: that makes no large value.
MAX_REPEATS = 1 << 20

#: Maximum CPU time that counts between two checks, in seconds. A template is not charged for more,
#: because then the host was stopped.
MAX_CLOCK_STEP = 0.25

#: Number of characters that an element of a container counts for, in addition to its text.
#: Approximates the memory of an object. A list has at most MAX_VALUE_CHARACTERS / ELEMENT_SIZE
#: elements, whose copy takes 2 ms.
ELEMENT_SIZE = 32
#: Number of bytes that an element's slot counts for when its container is copied: a pointer.
_SLOT_SIZE = 8


class TemplateTimeoutError(jinja2.TemplateError):
    """An error for a rendering that exceeded its CPU time."""


class _RenderBudget(threading.local):
    time = CpuBudget(float("inf"), MAX_CLOCK_STEP, thread_time)
    bytes_left = MAX_TOTAL_BYTES


_budget = _RenderBudget()


def within_budget(seconds: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` with a new budget and return the result.

    Args:
        seconds: The CPU seconds of the budget, which also has MAX_TOTAL_BYTES bytes.
        work: The function to call.
        args: Positional arguments of `work`.
        kwargs: Keyword arguments of `work`.
    """
    previous = _budget.time, _budget.bytes_left
    _budget.time, _budget.bytes_left = CpuBudget(seconds, MAX_CLOCK_STEP, thread_time), MAX_TOTAL_BYTES
    try:
        return work(*args, **kwargs)
    finally:
        _budget.time, _budget.bytes_left = previous


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


def spend_bytes(size: int) -> None:
    """Count bytes that the rendering wrote.

    Raises:
        SecurityError: The rendering has written more bytes than its budget allows.
    """
    _budget.bytes_left -= size
    if _budget.bytes_left < 0:
        raise SecurityError("the rendered text is too long")


def check_result_size(characters: int) -> None:
    """Check the size of a value before the value is created.

    Raises:
        SecurityError: The value would be too long.
    """
    if characters > min(MAX_VALUE_CHARACTERS, _budget.bytes_left):
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
    """Count the bytes of a text, or of a container without its elements, and return `value`.

    Raises:
        SecurityError: The rendering has written too much, or the container is too long.
    """
    kind = type(value)
    if isinstance(value, str):
        spend_bytes(value.__sizeof__())
    elif kind is list or kind is tuple:
        _check_value_size(ELEMENT_SIZE * len(value))
        spend_bytes(_SLOT_SIZE * len(value))
    elif kind is dict:
        spend_bytes(2 * ELEMENT_SIZE * len(value))
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
    """Return a value that the template writes, and count the size of other values than text.

    The bytes of a text were counted when the text was created.
    """
    if not isinstance(value, str):
        spend_bytes(text_size(value))
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
    """Join `texts`, count the bytes, and return the result.

    Raises:
        SecurityError: The result would be too long. It is not created.
    """
    parts = texts if isinstance(texts, list | tuple) else list(texts)
    check_result_size(sum(map(len, parts)))
    text = "".join(parts)
    spend_bytes(text.__sizeof__())
    return text
