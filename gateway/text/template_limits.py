"""How long a text or list a filter, method or operator would make, asked before it makes it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS

from llmops.gateway.text.render_budget import (
    charge_value,
    check_result_size,
    check_time,
    checked_count,
    text_size,
    timed_iteration,
)

Size = Callable[..., int]

MAX_EXPONENT = 1024
_BITS = 1 << 16
_DECIMALS = 64
#: for HTML pages: no chat template needs them, and they are slow or grow in ways of their own
FORBIDDEN_FILTERS = frozenset({"filesizeformat", "pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"})
#: these look at their value without making text of it or comparing its elements
_PLAIN_FILTERS = frozenset(
    ["abs", "attr", "batch", "count", "d", "default", "first", "float", "int", "items", "last", "length", "list", "map",
     "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice"]
)  # fmt: skip
_COMPARING_TESTS = frozenset(
    ["==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in"]
)
#: methods of texts and numbers that a chat template has no use for
FORBIDDEN_METHODS = frozenset(
    ["encode", "expandtabs", "format_map", "from_bytes", "fromhex", "fromkeys", "maketrans", "to_bytes", "translate"]
)
_FORMAT = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)


# -- operators ---------------------------------------------------------------------------------------------------------


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises SecurityError for a product, power or formatted text that would be too large."""
    if operator == "**":
        _check_power(left, right)
    elif operator == "%":
        if isinstance(left, str):
            check_result_size(_formatted(left, right))
    else:
        _check_product(left, right)
        _check_product(right, left)


def _check_power(base: Any, exponent: Any) -> None:
    if not all(isinstance(value, int | float) and abs(value) <= MAX_EXPONENT for value in (base, exponent)):
        raise SecurityError("a power is too large")


def _check_product(left: Any, right: Any) -> None:
    if not isinstance(right, int):
        return
    if isinstance(left, str | list | tuple):
        check_result_size(len(left) * checked_count(right))
    elif isinstance(left, int) and left.bit_length() + right.bit_length() > _BITS:
        raise SecurityError("a product is too large")


def _formatted(form: str, values: Any) -> int:
    """The most that `form % values` can have; a mapping's values can each stand there several times."""
    size = len(form) + text_size(values) * (form.count("%") if isinstance(values, Mapping) else 1)
    for found in _FORMAT.finditer(form):
        if "*" in found.groups():
            raise SecurityError("a width that is not in the format itself is not allowed")
        size += sum(_width(number) for number in found.groups() if number)
    return size


def _width(digits: str) -> int:
    return checked_count(int(digits) if len(digits) < 20 else float("inf"))


# -- filters -----------------------------------------------------------------------------------------------------------


def _centred(value: Any, width: int = 80) -> int:
    return checked_count(width)


def _indented(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    lines = str(s).count("\n") + 1 if isinstance(s, str) else 1
    return lines * (len(width) if isinstance(width, str) else checked_count(width))


def _replaced(s: Any, old: Any, new: Any, count: int | None = None) -> int:
    return _replacement(s, old, new) if isinstance(s, str) and isinstance(old, str) else 0


def _replacement(text: str, old: str, new: Any) -> int:
    return text.count(old) * text_size(new)


def _rows(value: Any, linecount: int, fill_with: Any = None) -> int:
    return checked_count(linecount)


def _columns(value: Any, slices: int, fill_with: Any = None) -> int:
    return checked_count(slices)


def _rounded(value: Any, precision: int = 0, method: str = "common") -> int:
    if abs(precision) > _DECIMALS:
        raise SecurityError("a number of decimals is too large")
    return 0


def _filled(value: Any, *args: Any, **kwargs: Any) -> int:
    return _formatted(value, kwargs or args) if isinstance(value, str) else 0


def _joined(value: Any, d: Any = "", attribute: Any = None) -> int:
    return len(value) * text_size(d) if hasattr(value, "__len__") else 0


def _summed(iterable: Any, attribute: Any = None, start: Any = 0) -> int:
    # lists are added up one by one, each time all anew
    return 0 if isinstance(start, int | float) else len(iterable) * (text_size(iterable) + text_size(start))


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> int:
    size = text_size(value)
    step = len(indent) if isinstance(indent, str) else checked_count(indent or 0)
    around = sum(map(len, separators)) if isinstance(separators, tuple | list) else 0
    return (6 * size if ensure_ascii else size) + (size // 32) * (around + step * (_depth(value) if step else 0))


def _depth(value: Any) -> int:
    """How deep lists and mappings lie in each other; json itself refuses what is deeper than Python's stack."""
    depth, level = 0, [value] if isinstance(value, dict | list | tuple) else []
    while level and depth < 1000:
        depth += 1
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [one for part in inner for one in part if isinstance(one, dict | list | tuple)]
    return depth


_FILTER_SIZES: dict[str, Size] = {
    "batch": _rows,
    "center": _centred,
    "format": _filled,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "slice": _columns,
    "sum": _summed,
    "tojson": _as_json,
}


def bounded_filters(own: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Jinja's filters and `own`, each within the allowance."""
    known = {name: one for name, one in {**FILTERS, **own}.items() if name not in FORBIDDEN_FILTERS}
    return {name: _bounded(name, one) for name, one in known.items()}


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    plain, size = name in _PLAIN_FILTERS, _FILTER_SIZES.get(name)
    # the environment or context that some filters get first
    leading = 1 if hasattr(work, "jinja_pass_arg") else 0
    alone = leading + 1

    @functools.wraps(work)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_time()
        if len(args) == alone and type(args[leading]) is str and size is None:
            return charge_value(work(*args, **kwargs))
        if not plain:
            args = (*args[:leading], *map(_materialized, args[leading:]))
            for value in args[leading:]:
                text_size(value)
        if size is not None:
            check_result_size(size(*args[leading:], **kwargs))
        made = work(*args, **kwargs)
        return timed_iteration(made) if isinstance(made, Iterator) else charge_value(made)

    return bounded


def _materialized(value: Any) -> Any:
    """What is still to be made is made first, so that it can be measured."""
    return list(value) if isinstance(value, Iterator) else value


def bounded_tests(known: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Jinja's tests, those that compare with a measure before them."""
    return {name: _comparing(one) if name in _COMPARING_TESTS else one for name, one in known.items()}


def _comparing(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def bounded(value: Any, other: Any) -> Any:
        return test(checked_comparand(value), checked_comparand(other))

    return bounded


def checked_comparand(value: Any) -> Any:
    """`value`, which is about to be compared or looked up."""
    if isinstance(value, list | tuple | dict):
        text_size(value)
    return value


# -- methods -----------------------------------------------------------------------------------------------------------


def _padded(text: str, width: Any, *_: Any) -> int:
    return checked_count(width)


def _replaced_in(text: str, old: Any, new: Any, *_: Any) -> int:
    return _replacement(text, old, new) if isinstance(old, str) else 0


def _joined_by(text: str, parts: Any) -> int:
    return text_size(parts) + len(parts) * len(text) if hasattr(parts, "__len__") else 0


_METHOD_SIZES: dict[str, Size] = {
    "center": _padded,
    "join": _joined_by,
    "ljust": _padded,
    "replace": _replaced_in,
    "rjust": _padded,
    "zfill": _padded,
}


def check_method(owner: Any, name: str, args: Sequence[Any]) -> None:
    """Raises SecurityError when the method of a text or list would make too much, or compare without end."""
    for value in args:
        checked_comparand(value)
    if isinstance(owner, str):
        size = _METHOD_SIZES.get(name)
        if size is not None:
            check_result_size(len(owner) + size(owner, *args))
    else:
        checked_comparand(owner)


def check_format_field(spec: str, value: Any) -> None:
    """A field of str.format: its width and precision, and what it writes."""
    check_result_size(text_size(value) + sum(_width(number) for number in _NUMBER.findall(spec)))
