"""Marks the control tokens that a chat template writes, in its syntax tree, before it is compiled.

Texts that only look for something, such as `'<|x|>' in content` or `content.split('<|x|>')`, stay as they are: they
are compared with what clients sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jinja2 import nodes

from llmops.gateway.text.control_tokens import ControlTokens

UNMARKED = "llmops unmarked"
# the first argument of these is looked for, or cut off
_SEARCHING = frozenset(
    ["count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
     "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip", "trim"]
)  # fmt: skip


class ControlTokenMarker:
    """Walks one template's syntax tree."""

    def __init__(self, controls: ControlTokens, special_tokens: Mapping[str, str]) -> None:
        self._controls = controls
        self._names = frozenset(special_tokens)

    def mark(self, node: nodes.Node) -> None:
        """Change the tree under `node` in place."""
        if isinstance(node, nodes.TemplateData):
            node.data = self._controls.mark(node.data)
        elif isinstance(node, nodes.Const):
            if isinstance(node.value, str):
                node.value = self._controls.mark(node.value)
        elif isinstance(node, nodes.Compare):
            self._compare(node)
        else:
            for child in self._written(node):
                self.mark(child)

    def _written(self, node: nodes.Node) -> Iterator[nodes.Node]:
        """The children whose texts may get into the prompt."""
        sought = self._search_operands(node)
        return (child for child in node.iter_child_nodes() if not any(child is one for one in sought))

    def _search_operands(self, node: nodes.Node) -> list[nodes.Node]:
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _SEARCHING:
            return list(node.args[:1])
        if isinstance(node, nodes.Filter) and node.name in _SEARCHING:
            return list(node.args[:1])
        if isinstance(node, nodes.Test):
            return list(node.args or ())
        if isinstance(node, nodes.Getitem):
            return [node.arg]
        return [node.key] if isinstance(node, nodes.Pair) else []

    def _compare(self, node: nodes.Compare) -> None:
        """Both sides without marks, where one of them names a control token."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if any(self._names_control(one) for one in sides):
            node.expr = _unmarked(node.expr)
            for operand in node.ops:
                operand.expr = _unmarked(operand.expr)

    def _names_control(self, node: nodes.Expr) -> bool:
        names = [*node.find_all(nodes.Name), *([node] if isinstance(node, nodes.Name) else [])]
        texts = [*node.find_all(nodes.Const), *([node] if isinstance(node, nodes.Const) else [])]
        return any(one.name in self._names for one in names) or any(
            isinstance(one.value, str) and self._controls.found_in(one.value) for one in texts
        )


def _unmarked(node: nodes.Expr) -> nodes.Expr:
    return (
        node if isinstance(node, nodes.Const) else nodes.Filter(node, UNMARKED, [], [], None, None, lineno=node.lineno)
    )
