"""Keeps a chat template from running away: a deadline that every loop looks at, and no huge products.

A template is code that runs over what clients send: one that is quadratic in the messages is enough to stop a
gateway, and a thread cannot be ended from outside. Jinja's own sandbox limits neither time nor memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_REPETITION = 1 << 20
LARGEST_POWER = 1024
_CHECK = "llmops_within_time"


class TemplateTimeoutError(jinja2.TemplateError):
    """The template took longer than it may."""


class _Clock(threading.local):
    deadline = float("inf")


_clock = _Clock()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Templates of a GuardedEnvironment that render within this block, in this thread, end after `seconds`."""
    before, _clock.deadline = _clock.deadline, monotonic() + seconds
    try:
        yield
    finally:
        _clock.deadline = before


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with the limits above."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters[_CHECK] = _within_time

    # not public in jinja2, but the only place where a tree can be changed before it is compiled
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _CHECK, [], [], None, None, lineno=loop.lineno)
        return template.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _refuse_large_power(left, right)
        else:
            _refuse_long_repetition(left, right)
            _refuse_long_repetition(right, left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check()
        return super().call(context, obj, *args, **kwargs)


def _refuse_large_power(base: Any, exponent: Any) -> None:
    if not all(isinstance(value, int | float) and abs(value) <= LARGEST_POWER for value in (base, exponent)):
        raise SecurityError("a power is too large")


def _refuse_long_repetition(items: Any, times: Any) -> None:
    if isinstance(items, str | list | tuple) and isinstance(times, int) and len(items) * times > LONGEST_REPETITION:
        raise SecurityError("a repeated text or list is too long")


def _within_time(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check()
        yield item


def _check() -> None:
    if monotonic() > _clock.deadline:
        raise TemplateTimeoutError("it takes too long")
