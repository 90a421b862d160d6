"""Keeps a chat template from running away: every loop looks at the time, and what can grow is measured first.

A template is code that comes with a checkpoint and runs over what clients send. A thread cannot be ended from outside,
and Jinja's own sandbox limits neither time nor memory (docs/decisions/0008-untrusted-text.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, cast

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from llmops.gateway.text.render_budget import (
    charge_value,
    check_time,
    checked_text,
    joined,
    spend_characters,
    timed_iteration,
)
from llmops.gateway.text.template_limits import (
    FORBIDDEN_METHODS,
    bounded_filters,
    bounded_tests,
    check_format_field,
    check_method,
    check_operator,
    checked_comparand,
)

# names that no template can write
_TIME, _CHARGED, _TEXTED, _COMPARED = ("llmops within time", "llmops charged", "llmops texted", "llmops compared")
# operands of a chain of `+` after which what has come together is counted
_CHARGED_CHAIN_LENGTH = 8


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox, within the allowance."""

    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(joined)  # type: ignore[assignment]

    def __init__(
        self,
        *args: Any,
        filters: Mapping[str, Callable[..., Any]],
        prepare: Callable[[nodes.Template], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """`filters` are there besides Jinja's own, or in their place. `prepare` changes trees before the guard."""
        super().__init__(*args, **kwargs)
        self._prepare = prepare
        self.filters = bounded_filters(dict(filters))
        self.filters.update(
            {_TIME: timed_iteration, _CHARGED: charge_value, _TEXTED: checked_text, _COMPARED: checked_comparand}
        )
        self.tests: dict[str, Any] = bounded_tests(dict(self.tests))
        del self.globals["lipsum"]

    # not public in jinja2, but the only place where a tree can be changed before it is compiled
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        if self._prepare is not None:
            self._prepare(template)
        return _instrument(template).set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return charge_value(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_time()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | list | tuple | dict):
            args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
            check_method(owner, obj.__name__, args)
        return charge_value(super().call(context, obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in FORBIDDEN_METHODS and isinstance(obj, str | int | float | type):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        form, formatter = str(value.__self__), _LimitedFormatter(self)
        return lambda *args, **kwargs: formatter.vformat(form, args, kwargs)


class _LimitedFormatter(SandboxedFormatter):
    """`str.format` with bounded widths."""

    def format_field(self, value: Any, format_spec: str) -> str:
        check_time()
        check_format_field(format_spec, value)
        text = Formatter.format_field(self, value, format_spec)
        spend_characters(len(text))
        return str(text)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(checked_text(value), conversion)


def _instrument(template: nodes.Template) -> nodes.Template:
    """The tree with a measure around what takes time, makes text or compares."""
    for loop in template.find_all(nodes.For):
        loop.iter = _through_filter(_TIME, cast(nodes.Expr, loop.iter))
    for comparison in template.find_all(nodes.Compare):
        _measure_comparison(comparison)
    for concat in template.find_all(nodes.Concat):
        concat.nodes = [_as_text(one) for one in concat.nodes]
    for output in template.find_all(nodes.Output):
        output.nodes = [_as_text(one) for one in output.nodes]
    for item in template.find_all(nodes.Getitem):
        if not isinstance(item.arg, nodes.Const | nodes.Slice):
            item.arg = _through_filter(_COMPARED, item.arg)
    for pair in template.find_all(nodes.Pair):
        if not isinstance(pair.key, nodes.Const):
            pair.key = _through_filter(_COMPARED, pair.key)
    _charge(template)
    return template


def _through_filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _as_text(node: nodes.Expr) -> nodes.Expr:
    return (
        node
        if isinstance(node, nodes.TemplateData | nodes.Const) or _adds_text(node)
        else _through_filter(_TEXTED, node)
    )


def _adds_text(node: nodes.Expr) -> bool:
    """A chain of `+` with a text of the template's own is text itself, or fails."""
    while isinstance(node, nodes.Add):
        if any(isinstance(one, nodes.Const) and isinstance(one.value, str) for one in (node.left, node.right)):
            return True
        node = node.left
    return False


def _measure_comparison(comparison: nodes.Compare) -> None:
    """What is compared with a text or number of the template's own is compared in one step."""
    if not any(isinstance(one, nodes.Const) for one in (comparison.expr, *(op.expr for op in comparison.ops))):
        comparison.expr = _through_filter(_COMPARED, comparison.expr)
        for operand in comparison.ops:
            operand.expr = _through_filter(_COMPARED, operand.expr)


def _charge(node: nodes.Node, chain: int = 0) -> None:
    """Count what `+`, `~` and slices make: of a chain of `+`, the whole and every eighth step."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, field, _charged_child(node, value, chain))
        elif isinstance(value, list):
            setattr(node, field, _charged_children(node, value))


def _charged_children(node: nodes.Node, children: Sequence[Any]) -> list[Any]:
    return [_charged_child(node, one, 0) if isinstance(one, nodes.Node) else one for one in children]


def _charged_child(parent: nodes.Node, child: nodes.Node, chain: int) -> nodes.Node:
    length = chain + 1 if isinstance(parent, nodes.Add) and isinstance(child, nodes.Add) else 0
    _charge(child, length)
    counted_sum = isinstance(child, nodes.Add) and length % _CHARGED_CHAIN_LENGTH == 0
    grows = counted_sum or isinstance(child, nodes.Concat) or _is_slice(child)
    return _through_filter(_CHARGED, child) if grows else child  # type: ignore[arg-type]


def _is_slice(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
