"""Tests of the work that a rendering is charged for, and when its time is checked.

They also cover what templates may use.
"""

from __future__ import annotations

import pytest
from jinja2 import Environment

from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text import render_budget
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.control_tokens import UNMARK_FILTER, ControlTokenMarker

VALUES = {"x": "ab", "y": "cde", "l": [1, 2], "n": 3}


def rendered(source: str) -> str:
    return ChatTemplate(source, {}).render([], variables=VALUES).text


@pytest.mark.parametrize("name", ["encode", "format_map", "to_bytes", "translate"])
def test_a_mapping_may_have_what_is_called_like_a_method(name):
    source = "{{ one." + name + " }}"
    assert ChatTemplate(source, {}).render([], variables={"one": {name: "its value"}}).text == "its value"


# -- templates ---------------------------------------------------------------------------------------------------------


def test_a_template_has_so_many_characters(monkeypatch):
    assert ChatTemplate("x" * (1 << 17), {}).render([]).text == "x" * (1 << 17)
    with pytest.raises(InputError, match="more than 131072 characters"):
        ChatTemplate("x" * (1 << 17) + "x", {})


def test_a_rendering_has_a_second(monkeypatch):
    moments = iter(0.2 * at for at in range(100))
    one = ChatTemplate("{% for a in range(9) %}{{ a }}{% endfor %}", {})
    monkeypatch.setattr(render_budget, "thread_time", lambda: next(moments))
    with pytest.raises(InvalidRequestError, match=r"needs more than 1 s for these"):
        one.render([])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ add_generation_prompt }}{{ tools }}", "TrueNone"),
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(True, 1, (',', ':'), True) }}", '{\n "a":1,\n "b":"\\u00e9"\n}'),
        ("  {% if true %}\nx{% endif %}\n y", "x y"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
    ],
)
def test_what_a_template_has(source, text):
    assert ChatTemplate(source, {}).render([]).text == text


@pytest.mark.parametrize(
    "source", ["{{ 1 // n }}", "{{ x.y.z }}", "{{ [].pop() }}", "{{ x | int(base=99) + [] }}", "{{ n + 'a' }}"]
)
def test_what_a_template_fails_with_is_told(source):
    with pytest.raises(InvalidRequestError, match=r"^The chat template cannot render these messages: "):
        ChatTemplate(source, {}).render([], variables={"n": 0, "d": {}})


@pytest.mark.parametrize(
    ("source", "kind"), [("{% if %}", "TemplateSyntaxError"), ("{{ x | nothing }}", "TemplateAssertionError")]
)
def test_what_cannot_be_compiled_is_told(source, kind):
    with pytest.raises(InputError, match=rf"^The chat template cannot be compiled: {kind}: "):
        ChatTemplate(source, {})


# -- marks -------------------------------------------------------------------------------------------------------------


class Controls:
    """`<s>` is one, and `!` the mark."""

    def mark(self, text: str) -> str:
        return text.replace("<s>", "!<s>")

    def found_in(self, text: str) -> bool:
        return "<s>" in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<s>{{ x }}", "!<s>a<s>b"),
        ("{{ '<s>' }}{{ 5 }}{{ ['<s>', x] | join }}", "!<s>5!<s>a<s>b"),
        ("{{ x.replace('<s>', '<s>') }}", "a!<s>b"),
        ("{{ x | replace('<s>', '<s>') }}", "a!<s>b"),
        ("{{ x.split('<s>') | join('<s>') }}", "a!<s>b"),
        ("{{ '<s>x'.replace('x', 'y') }}", "!<s>y"),
        ("{{ '<s>' | upper }}", "!<S>"),
        ("{{ x | default('<s>') }}{{ z | default('<s>') }}", "a<s>b!<s>"),
        ("{{ d.get('z', '<s>') }}", "!<s>"),
        ("{{ d['<s>'] }}{{ {'<s>': '<s>'}['<s>'] }}", "7!<s>"),
        ("{{ s is eq('<s>') }}{{ s is string }}", "TrueTrue"),
        ("{{ s == '<s>' }}{{ '<s>' == s }}{{ '<s>' in x }}", "TrueTrueTrue"),
        ("{% set e = '<s>' %}{{ e == '<s>' }}{{ e == s }}", "TrueFalse"),
        ("{{ t == s }}{{ t ~ '' == s }}{{ s == s == t }}", "TrueTrueTrue"),
        ("{{ t == t }}{{ t in [s] }}{{ s == 5 }}", "TrueTrueFalse"),
        ("{% if x.startswith('a<s>') %}{{ t }}{% endif %}", "!<s>"),
    ],
)
def test_marks(source, text):
    """`x`, `s` and the key of `d` are a client's, `t` is the template's."""
    environment = Environment()
    environment.filters[UNMARK_FILTER] = lambda value: value.replace("!", "") if isinstance(value, str) else value
    tree = environment.parse(source)
    ControlTokenMarker(Controls(), {"t": "<s>"}).mark(tree)
    marked = environment.from_string(tree)
    assert marked.render(x="a<s>b", s="<s>", d={"<s>": 7}, t="!<s>") == text
