"""A Jinja2 sandbox that limits the time and memory of a chat template.

A template is code that comes with a checkpoint and processes texts from clients. A thread cannot be
stopped from outside, and Jinja's own sandbox limits neither time nor memory. The checks therefore
run inside the template: loops and calls check the time, and the size of each value that could be
large is computed before the value is created (docs/decisions/0008-untrusted-text.md).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from typing import Any, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from llmops.gateway.text.render_budget import (
    ELEMENT_SIZE,
    charge_value,
    check_loop_time,
    check_result_size,
    check_time,
    checked_count,
    checked_value,
    join_texts,
    output_value,
    spend_bytes,
    text_size,
    timed_elements,
    timed_iteration,
)

#: Maximum base and exponent of a power. Larger numbers take noticeable time to compute.
MAX_EXPONENT = 1024
_MAX_PRODUCT_BITS = 1 << 16

#: Filters for HTML pages, which templates cannot use. No chat template needs them, and they are
#: slow or produce large texts that the checks do not cover.
FORBIDDEN_FILTERS = frozenset({"filesizeformat", "pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"})

#: Methods of texts and numbers that templates cannot use. They produce large values, and no chat
#: template needs them.
FORBIDDEN_METHODS = frozenset(
    ["encode", "expandtabs", "format_map", "from_bytes", "fromhex", "fromkeys", "maketrans", "to_bytes", "translate"]
)

#: Filters whose arguments need no check of their size, because the filters neither convert
#: arguments to text nor compare elements.
_PLAIN_FILTERS = frozenset(
    ["abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length", "list", "map",
     "random", "reject", "rejectattr", "reverse", "select", "selectattr"]
)  # fmt: skip

#: Filters that iterate over their first argument, some without giving a result in between.
_ITERATING = frozenset(
    ["batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice",
     "sort", "sum", "unique"]
)  # fmt: skip

#: Filters and methods whose result, or work, can be much larger than their arguments.
_GROWING = frozenset(
    ["batch", "capitalize", "casefold", "center", "format", "indent", "join", "ljust", "lower", "lstrip", "replace",
     "rjust", "round", "rsplit", "rstrip", "slice", "split", "splitlines", "strip", "sum", "swapcase", "title", "trim",
     "upper", "wordcount", "zfill"]
)  # fmt: skip

#: Methods and filters that look up each character that is not ASCII. A text of the maximum size
#: would hold the GIL for a third of a second.
_CHANGING_CASE = frozenset(["capitalize", "casefold", "lower", "swapcase", "upper"])
#: Number of characters of a result that such a character costs as much as.
_CASE_COST = 8
#: Separators of `str.splitlines`.
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

#: Methods and filters that look for each character at the ends of a text in another text.
_STRIPPING = frozenset(["lstrip", "rstrip", "strip", "trim"])
#: Maximum number of characters that are stripped from a text. A text of 8 MB and a million of them
#: hold the GIL for a minute.
_MAX_STRIPPED = 256

#: Maximum number of operators in a chain of `+` that is computed step by step. Longer chains are
#: computed by one call, because each step may produce a value of the maximum size.
_MAX_PLAIN_SUM = 8

#: Names of the filters that the instrumented syntax tree calls. They contain a space, so a template
#: cannot call them.
_ADD, _CHARGE, _CHARGE_TEXT, _CHECK, _CHECK_TIME, _CONCATENATE, _ITERATE, _OUTPUT = (
    "llmops add", "llmops charge", "llmops charge text", "llmops check", "llmops check time", "llmops concatenate",
    "llmops iterate", "llmops output",
)  # fmt: skip

_FORMAT_FIELD = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)


class _CheckInserter(NodeTransformer):
    """A transformer that inserts checks of time and size into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.iter = _call_filter(_ITERATE, node.iter)
        # An iterator alone could not check: `loop.length` makes a list of it.
        node.body.insert(0, nodes.ExprStmt(_call_filter(_CHECK_TIME, nodes.Const(None)), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [one if _is_text(one) else _call_filter(_OUTPUT, one) for one in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """Insert a check of the characters that a chain of `+` produces as a whole.

        Long chains become a single call, without intermediate results.
        """
        first, operands = node, [self.visit(node.right)]
        while isinstance(first.left, nodes.Add):
            first.right, first = operands[-1], first.left
            operands.append(self.visit(first.right))
        first.left, first.right = self.visit(first.left), operands[-1]
        if len(operands) > _MAX_PLAIN_SUM:
            return _call_filter(_ADD, first.left, operands[::-1])
        is_text = any(isinstance(one, nodes.Const) and isinstance(one.value, str) for one in (first.left, *operands))
        return _call_filter(_CHARGE_TEXT if is_text else _CHARGE, node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_filter(_CONCATENATE, node.nodes[0], node.nodes[1:])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _call_filter(_CHARGE, node)
        node.arg = _checked(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _checked(node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # A comparison with a constant ends at the first difference, and takes no time that needs a
        # check.
        if not any(isinstance(one, nodes.Const) for one in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = _checked(node.expr)
            for operand in node.ops:
                operand.expr = _checked(operand.expr)
        return node


def _call_filter(name: str, node: nodes.Node, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, args or [], [], None, None, lineno=node.lineno)


def _is_text(node: nodes.Node) -> bool:
    """Return True if an expression of a template certainly yields a text that the budget counts.

    The budget counted the characters when the text was created. A text plus another value is a
    text, or the addition raises an error.
    """
    is_sum = isinstance(node, nodes.Filter) and node.name in (_CHARGE_TEXT, _CONCATENATE)
    return is_sum or isinstance(node, nodes.TemplateData | nodes.Const)


def _checked(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call_filter(_CHECK, node)


class _CheckedCodeGenerator(CodeGenerator):
    """A code generator that first inserts checks of time and size into the syntax tree."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        environment = cast(LimitedSandbox, self.environment)
        environment.prepare(node)
        super().visit_Template(_CheckInserter().visit(node).set_environment(environment), frame)


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on time and size.

    Templates must be rendered inside `within_budget`.
    """

    code_generator_class = _CheckedCodeGenerator
    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(join_texts)  # type: ignore[assignment]

    def __init__(
        self,
        *,
        filters: Mapping[str, Callable[..., Any]],
        prepare: Callable[[nodes.Template], None] = lambda template: None,
        **options: Any,
    ) -> None:
        """Create the environment.

        Args:
            filters: Filters in addition to Jinja's own, or in place of Jinja's filters of the same
                name.
            prepare: Changes the syntax tree of each template before the checks are inserted.
            options: Options of Jinja's Environment.
        """
        super().__init__(**options)
        self.prepare = prepare
        allowed = {name: work for name, work in {**FILTERS, **filters}.items() if name not in FORBIDDEN_FILTERS}
        self.filters = {name: _limited_filter(name, work) for name, work in allowed.items()}
        self.filters |= {
            _ADD: _add,
            _CHARGE: charge_value,
            _CHARGE_TEXT: charge_value,
            _CHECK: checked_value,
            _CHECK_TIME: check_loop_time,
            _CONCATENATE: _concatenate,
            _ITERATE: timed_iteration,
            _OUTPUT: output_value,
        }
        self.tests = {name: _limited_test(name, cast(Callable[..., Any], test)) for name, test in self.tests.items()}
        del self.globals["lipsum"]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(value, int | float) and abs(value) <= MAX_EXPONENT for value in (left, right)):
                raise SecurityError("a power in the template is too large")
        elif operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif isinstance(left, str):
            check_result_size(_formatted_size(left, right))
        return charge_value(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        check_time()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | list | tuple | dict):
            args = tuple(checked_value(_materialized(value)) for value in args)
            if not isinstance(owner, str):
                checked_value(owner)
            elif obj.__name__ == "join":
                _check_growth("join", *args, owner)
            elif obj.__name__ in _GROWING:
                _check_growth(obj.__name__, owner, *args, **kwargs)
        result = charge_value(super().call(context, obj, *args, **kwargs))
        if isinstance(owner, str) and isinstance(result, list | tuple):
            # Each part is a new text.
            spend_bytes(sum(part.__sizeof__() for part in result))
        return result

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
    """`str.format` with limits on widths and values."""

    def format_field(self, value: Any, format_spec: str) -> str:
        check_time()
        check_result_size(text_size(value) + sum(map(_width, _NUMBER.findall(format_spec))))
        text = Formatter.format_field(self, value, format_spec)
        return str(charge_value(text))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(checked_value(value), conversion)


def _add(*operands: Any) -> Any:
    """Return the sum of `operands`, added from left to right."""
    if {*map(type, operands)} == {str}:
        return join_texts(operands)
    result = operands[0]
    for operand in operands[1:]:
        result = charge_value(result + operand)
    return result


def _concatenate(*values: Any) -> str:
    """Return the operands of `~`, joined as text."""
    return join_texts([value if type(value) is str else str(checked_value(value)) for value in values])


def _limited_filter(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter `work` with checks of time and size."""
    is_plain, is_growing, is_iterating = name in _PLAIN_FILTERS, name in _GROWING, name in _ITERATING
    # Some filters receive the environment or context as their first argument.
    leading = 1 if hasattr(work, "jinja_pass_arg") else 0

    @functools.wraps(work)
    def limited(*args: Any, **kwargs: Any) -> Any:
        check_time()
        if not is_plain and (is_growing or len(args) > leading + 1 or type(args[leading]) is not str):
            values = [checked_value(_materialized(value)) for value in args[leading:]]
            if is_growing:
                _check_growth(name, *values, **kwargs)
            args = (*args[:leading], *values)
        if is_iterating:
            args = (*args[:leading], timed_elements(args[leading]), *args[leading + 1 :])
        result = work(*args, **kwargs)
        is_iterator = type(result) is not str and isinstance(result, Iterator)
        return timed_iteration(result) if is_iterator else charge_value(result)

    return limited


def _materialized(value: Any) -> Any:
    """Return an iterator as a list, which has a size, and other values unchanged."""
    return list(value) if isinstance(value, Iterator) else value


def _limited_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    """Return `test`, with a check of the operands' sizes if it compares them."""
    if name != "in" and getattr(test, "__module__", "") != "_operator":
        return test

    @functools.wraps(test)
    def limited(value: Any, other: Any) -> Any:
        return test(checked_value(value), checked_value(other))

    return limited


def _check_growth(name: str, value: Any, /, *args: Any, **options: Any) -> None:
    """Check the size of the result of a filter or method in _GROWING.

    The size is computed from the arguments of the call.

    Raises:
        SecurityError: The result would be too large.
    """
    if name == "format":
        if isinstance(value, str):
            check_result_size(_formatted_size(value, options or args))
        return
    given = [*args, *options.values()]
    if name in _STRIPPING and any(isinstance(one, str) and len(one) > _MAX_STRIPPED for one in given):
        raise SecurityError("a text of characters to strip is too long")
    if name in ("title", "wordcount"):
        check_result_size(ELEMENT_SIZE * text_size(value))  # both take the text apart
    if name in _CHANGING_CASE and isinstance(value, str) and not value.isascii():
        check_result_size(_CASE_COST * len(value))
    if name in ("split", "rsplit", "splitlines"):
        check_result_size(ELEMENT_SIZE * _part_count(name, value, *args, **options))
        return
    added = sum(map(checked_count, given)) + sum(len(one) for one in given if isinstance(one, str))
    if name == "replace" and isinstance(value, str) and len(args) > 1 and isinstance(args[0], str):
        added = value.count(args[0]) * text_size(args[1])
    elif name == "indent":
        # Four spaces are the default width of Jinja's filter `indent`.
        added = (value.count("\n") + 1 if isinstance(value, str) else 1) * max(added, 4)
    elif name == "join":
        added *= len(value) if hasattr(value, "__len__") else 0
    elif name == "sum":
        # Lists are added one by one, and each step copies the sum so far.
        added = len(value) * text_size(value) if any(isinstance(one, list | tuple | str) for one in given) else 0
    check_result_size(text_size(value) + added)


def _part_count(name: str, text: str, sep: Any = None, maxsplit: Any = -1, **_options: Any) -> int:
    """Return an upper bound of the number of parts into which a method splits `text`."""
    if name == "splitlines":
        return 1 + sum(map(text.count, _LINE_ENDS))
    count = text.count(sep) if isinstance(sep, str) and sep else len(text) // 2
    return 1 + (min(count, maxsplit) if isinstance(maxsplit, int) and maxsplit >= 0 else count)


def _check_product(factor: Any, count: Any) -> None:
    """Check the size of `factor * count` before it is computed.

    Raises:
        SecurityError: The text or list would be too long, or the number too large.
    """
    if not isinstance(count, int):
        return
    if isinstance(factor, str | list | tuple):
        check_result_size(len(factor) * checked_count(count) * (1 if isinstance(factor, str) else ELEMENT_SIZE))
    elif isinstance(factor, int) and factor.bit_length() + count.bit_length() > _MAX_PRODUCT_BITS:
        raise SecurityError("a product in the template is too large")


def _formatted_size(form: str, values: Any) -> int:
    """Return an upper bound of the number of characters in `form % values`.

    Values of a mapping can be written several times.
    """
    size = len(form) + text_size(values) * (form.count("%") if isinstance(values, Mapping) else 1)
    for field in _FORMAT_FIELD.finditer(form):
        if "*" in field.groups():
            raise SecurityError("a format of the template takes its width from a value, which is not allowed")
        size += sum(_width(digits) for digits in field.groups() if digits)
    return size


def _width(digits: str) -> int:
    return checked_count(int(digits) if len(digits) < 20 else float("inf"))
