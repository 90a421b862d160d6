"""Tests of the limits of templates.

Every way to a huge text, list or number ends in one sentence, soon, in little memory.
"""

import resource
import subprocess
import sys
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.chat_template import ChatTemplate, to_json

GROW = "{% set ns = namespace(a=START) %}{% for i in range(60) %}{% set ns.a = STEP %}{% endfor %}{{ USE }}"


def grown(start: str, step: str, use: str = "ns.a | length") -> str:
    return GROW.replace("START", start).replace("STEP", step).replace("USE", use)


LISTS = "[ns.a, ns.a]"
LONG = "{% set x = ('a' * 1000000) * 7 %}"
HOSTILE = [
    "{{ '%0600000000d' % 1 }}", "{{ '%.600000000f' % 1.5 }}", "{{ '%*d' % (600000000, 1) }}",
    "{{ ('%0999999d' * 9999) % ((1,) * 9999) }}", "{% set x = 'a' * 1000000 %}{{ ('%s' * 9999) % ((x,) * 9999) }}",
    "{% set x = 'a' * 1000000 %}{{ ('%(x)s' * 9999) % {'x': x} }}", "{{ '%0600000000d' | format(1) }}",
    "{{ 'x' | center(600000000) }}", "{{ 'x'.center(600000000) }}", "{{ 'x'.ljust(600000000) }}",
    "{{ 'x'.rjust(600000000) }}", "{{ 'x'.zfill(600000000) }}", "{% set f = 'x'.center %}{{ f(600000000) }}",
    "{% for f in ['x'] | map(attribute='center') %}{{ f(600000000) }}{% endfor %}",
    "{{ range(99999) | map('center', 1000000) | list | length }}",
    "{{ range(99999) | map('center', 1000000) | join }}", "{{ ('x' | attr('center'))(600000000) }}",
    "{{ ('\t' * 1000000).expandtabs(1000000) }}", "{{ '{:600000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 600000000) }}", "{{ ('{:600000000}' | attr('format'))(1) }}",
    "{{ '{a:600000000}'.format_map({'a': 1}) }}", grown("[1]", LISTS, "'{!r}'.format(ns.a)"),
    "{{ ('a' * 1000000).translate({97: 'b' * 1000000}) }}", "{{ 'a'.encode('utf-32') }}",
    "{{ (1).to_bytes(600000000, 'big') }}", "{{ dict.fromkeys(range(99999), 'x' * 1000000) }}",
    "{{ 'x' * 600000000 }}", "{{ [0] * 600000000 }}", "{{ ('x' * 1000000) * 1000000 }}", "{{ 9 ** 9 ** 9 }}",
    grown("3", "ns.a * ns.a", "ns.a"), "{{ 1 | round(600000000, 'floor') }}",
    "{{ ('a' * 1000000) | replace('', 'b' * 1000000) | length }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}", "{{ range(99999) | join('b' * 1000000) | length }}",
    "{{ ('b' * 1000000).join(['x'] * 100000) | length }}", "{{ ('a\n' * 100000) | indent(1000000) | length }}",
    "{{ ('a\n' * 100000) | indent('b' * 1000000) | length }}", "{{ [[1] * 10000] * 100 | tojson(indent=1000000) }}",
    "{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) | length }}",
    "{{ range(9) | batch(600000000, 'x') | list | length }}", "{{ range(9) | slice(600000000) | list | length }}",
    "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}", grown("'x'", "ns.a + ns.a"),
    grown("'x'", " + ".join(["ns.a"] * 40)), grown("'x'", "ns.a ~ ns.a"), grown("[1]", "ns.a + ns.a"),
    grown("'x' * 1000000", "ns.a[:] ~ ns.a[1:]"), grown("'x'", "'{0}{0}'.format(ns.a)"),
    grown("'x'", "'%s%s' % (ns.a, ns.a)"), grown("'x'", "[ns.a, ns.a] | join"),
    grown("'x'", "ns.a").replace("{% set ns.a = ns.a %}", "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("'x'", "f(ns.a)"), grown("[1]", LISTS, "ns.a"),
    grown("[1]", LISTS, "ns.a | string"), grown("[1]", LISTS, "ns.a | tojson"), grown("[1]", LISTS, "ns.a ~ 'x'"),
    grown("[1]", LISTS, "'%s' % [ns.a]"), grown("[1]", LISTS, "ns.a | upper"),
    grown("{}", "{'a': ns.a, 'b': ns.a}", "ns.a"), grown("{}", "{'a': ns.a, 'b': ns.a}", "ns.a.items()"),
    grown("1", "namespace(a=ns.a, b=ns.a)", "ns.a"), "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    grown("(1,)", "(ns.a, ns.a)", "{}[ns.a]"), grown("(1,)", "(ns.a, ns.a)", "{ns.a: 1}"),
    grown("(1,)", "(ns.a, ns.a)", "ns.a in {}"), grown("(1,)", "(ns.a, ns.a)", "ns.a is in {}"),
    grown("(1,)", "(ns.a, ns.a)", "{}.get(ns.a)"), grown("(1,)", "(ns.a, ns.a)", "[ns.a] | unique | list"),
    LONG + "{{ x | sort | length }}", LONG + "{{ x | groupby('y') | list }}", LONG + "{{ x | join('-') | length }}",
    LONG + "{{ x | select('eq', 'b') | list }}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(20) %}{% set ns.a = ns.a + ns.a %}"
    "{% endfor %}{{ ns.a | select('eq', 2) | list }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{% for i in range(99999) %}" + "a" * 10_000 + "{% endfor %}", "{{ lipsum(n=100000000) }}",
    "{{ ('a' * 1000000) | wordwrap(1, wrapstring='b' * 1000000) }}", "{{ ('a' * 1000000) | urlize }}",
    LONG + "{{ x.strip('b' * 1000000 ~ 'a') }}", LONG + "{{ x.lstrip('b' * 1000000 ~ 'a') }}",
    LONG + "{{ x | trim('b' * 1000000 ~ 'a') }}", LONG + "{{ x | title }}", LONG + "{{ x | wordcount }}",
    "{% for i in [0] * 1000000 %}{{ loop.length }}" + "{% set x = i %}" * 99 + "{% endfor %}",
    "{% set x = 'ab ' * 1000000 %}{% set ns = namespace(a=[]) %}{% for i in range(60) %}"
    "{% set ns.a = ns.a + [x.split()] %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% set ns = namespace(a=[]) %}{% for i in range(900) %}"
    "{% set ns.a = ns.a + [x.partition('a')] %}{% endfor %}",
    "{% set ns = namespace(d={}, a=[]) %}{% for i in range(900) %}"
    "{% set ns.d = dict(ns.d, **{i | string: i}) %}{% endfor %}{% for i in range(99999) %}"
    "{% set ns.a = [ns.a, dict(ns.d)] %}{% endfor %}",
    "{{ strftime_now('%99999999d' * 200000) | length }}", "{{ ([1] * 1000000) * 8 | length }}",
    LONG + "{{ x.split('a') | length }}", LONG + "{{ (x ~ ' ').rsplit() | length }}",
    "{{ (('a\\v' * 1000000) * 4).splitlines() | length }}", grown("[1]", "ns.a + ns.a", "1"),
    "{% set x = ('ß' * 1000000) * 7 %}{{ x.swapcase() | length }}",
    "{% set x = ('ß' * 1000000) * 7 %}{{ x | upper | length }}",
    # 16 texts of 32 MB, all kept
    "{% set x = ('🦙' * 1000000) * 8 %}{% set ns = namespace(a=[]) %}{% for i in range(16) %}"
    "{% set ns.a = ns.a + [x[1:]] %}{% endfor %}",
]  # fmt: skip


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


RUN = """
import sys, time, resource
from llmops.errors import LlmopsError
from llmops.gateway.text.chat_template import ChatTemplate, to_json
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in eval(sys.stdin.read()):
    used = time.process_time()
    try:
        outcome = f"rendered {len(ChatTemplate(source, {}).render([]).text)}"
    except LlmopsError as error:
        outcome = "refused" if "MemoryError" not in repr(error.__cause__) else "out of memory"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{outcome} {time.process_time() - used:.1f} {grown >> 10}")
"""


def rendered(sources: Collection[str]) -> dict[str, tuple[str, float, int]]:
    """Return the result of each rendering, its CPU seconds and its MiB.

    The rendering runs in a process of its own, which would be killed if the guard failed.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=repr([*sources]), text=True, capture_output=True,
        preexec_fn=_bound_memory, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    return {one: (what, float(seconds), int(mb)) for one, (what, seconds, mb) in zip(sources, lines, strict=True)}


def test_no_template_takes_much_time_or_memory():
    found = rendered(HOSTILE)
    assert {source: one for source, one in found.items() if one[0] != "refused" or one[2] > 300} == {}
    slow = [name for name, one in found.items() if one[1] > 3]
    for _ in range(3 if slow else 0):
        # one that is slow is so each time; while its host stands still, another may be
        slow = [name for name, one in rendered(slow).items() if one[1] > 3]
    assert slow == []


TEXT = st.text("ab <>{}%|\n\t é🙂", max_size=12)
EXPRESSIONS = st.sampled_from(
    [
        "x + y", "x ~ y", "x * 3", "x[1:]", "x[::-1]", "x | trim", "x | replace('a', y)", "x | indent(2)", "x | upper",
        "x | center(9)", "x.ljust(9, '.')", "x.replace('a', 'bc')", "x.split('a') | join(y)",
        "x.split()", "x.rsplit('b', 1)", "x.split(maxsplit=1)", "x.splitlines()", "x.swapcase()", "[x, y] | tojson",
        "{'k': x} | tojson(indent=2)", "'%s-%5s' % (x, y)", "'{}{:>4}'.format(x, y)", "[x, y]",
        "{'k': x}.items() | list",
        "[x, y] | sort | join", "(x, y) == (y, x)", "x in [y]", "x is eq(y)", "[x, y] | unique | list", "x ~ 1 ~ none",
        "'%s' | format(x)", "[3, 1] | sum", "7 // 2 * 3 ** 2", "x | list | batch(2) | list", "'%5.1f%%' % 2.25",
        "x | title", "x | length + 1", "[1, 2] | map('string') | join('-')", "{x: y}[x]", "x | default(y) | string",
        "namespace(a=x).a", "x | truncate(5)", "x.join([y, y])", "x | e", "10 | round(1) | int",
        "'%(name)s %(size)s' | format(name=x, size=y)", "x | indent(width=2, first=true)", "[1, 2] | sum(start=3)",
    ]
)  # fmt: skip


@settings(max_examples=100)
@given(EXPRESSIONS, TEXT, TEXT)
def test_what_is_small_comes_out_as_without_the_guard(expression, x, y):
    source = "{% for i in [1] %}{{ " + expression + " }}{% endfor %}"
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = to_json
    expected = plain.from_string(source).render(x=x, y=y)
    assert ChatTemplate(source, {}).render([], variables={"x": x, "y": y}).text == expected


def test_a_refusal_names_the_template_not_the_gateway():
    with pytest.raises(InvalidRequestError, match=r"^The chat template cannot render .*too large") as caught:
        ChatTemplate("{{ 'x' | center(600000000) }}", {}).render([])
    assert (caught.value.status, caught.value.param) == (400, "messages")
