"""Chat templates as Hugging Face writes them, in a sandbox."""

import pytest

from llmops.errors import InputError
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.generation.parsers.tool_messages import messages_for_template
from llmops.gateway.text.chat_template import ChatTemplate

TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n{%- for m in messages %}\n    {%- if m.role == 'user' %}\n[{{ m.content | trim }}]\n"
    "    {% else %}\n{{ m.content }}{{ eos_token }}\n    {% endif %}\n{%- endfor %}\n",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}",
    "controls": "{% for m in messages %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    "{% generation %}x{% endgeneration %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
MESSAGES = [
    {"role": "user", "content": "  <b>Hé</b> & \"quotes\" 'and' 你好 "},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<a> & 'b' é", "parameters": {}}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name):
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        conversations=[MESSAGES], tools=TOOLS, chat_template=TEMPLATES[name], add_generation_prompt=True, **tokens
    )
    assert ChatTemplate(TEMPLATES[name], tokens).render(MESSAGES, tools=TOOLS).text == expected[0]


@pytest.mark.parametrize("source", [r"{{ '\ud800' }}", "{{ messages[0].tool_calls[0].function.arguments.a }}"])
def test_half_a_character_in_a_prompt_is_refused(source):
    """Before the fix, the tokenizer raised on it: the request got 500, and the log a traceback of 2 KB."""
    call = {"type": "function", "function": {"name": "now", "arguments": r'{"a": "\ud800"}'}}
    messages = messages_for_template([{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(InvalidRequestError, match="has half of a surrogate pair") as refused:
        ChatTemplate(source, {}).render(messages)
    assert (refused.value.param, "codec" in refused.value.message) == ("messages", False)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        # the sandbox holds
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", None),
        ("{{ messages.append(1) }}", None),
        ("{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}", None),
        ("{{ raise_exception.__globals__['os'] }}", None),
    ],
)
def test_a_refusal_of_the_template_or_its_sandbox_is_the_clients_error(source, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"


SLOW = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "loops over the text": "{% set t = messages[0].content * 2000 %}"
    "{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


class Clock:
    """A hundredth of a second between two looks, unless the test says more."""

    def __init__(self, *waits: float) -> None:
        self.now, self.looks, self._waits = 0.0, 0, list(waits)

    def __call__(self) -> float:
        self.looks += 1
        self.now += self._waits.pop(0) if self._waits else 0.01
        return self.now


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_runs_away_is_stopped(name, monkeypatch):
    template, clock = ChatTemplate(SLOW[name], {}, seconds=0.2), Clock()
    monkeypatch.setattr("llmops.gateway.text.render_budget.thread_time", clock)
    with pytest.raises(InvalidRequestError, match=r"needs more than 0\.2 s"):
        template.render(MESSAGES)
    # at the start, and until the time was over
    assert clock.looks in (21, 22)
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError, match=r"needs more than 0\.2 s"):
        template.render(MESSAGES)


def test_a_machine_that_stands_still_is_no_slow_template(monkeypatch):
    template = ChatTemplate("{% for a in range(50) %}{{ a }}{% endfor %}", {})
    monkeypatch.setattr("llmops.gateway.text.render_budget.thread_time", Clock(0, 20.0))
    assert template.render(MESSAGES).text.endswith("4849")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ add_generation_prompt }}{{ tools }}", "TrueNone"),
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(True, 1, (',', ':'), True) }}", '{\n "a":1,\n "b":"\\u00e9"\n}'),
        ("  {% if true %}\nx{% endif %}\n y", "x y"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{{ tools | map(attribute='function') | list }}{{ tools | selectattr('x') | list }}", "[][]"),
        # variables of a request do not replace its messages
        ("{{ messages | length }} {{ thinking }}", "3 True"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ ';' if not loop.last }}{% endfor %}", "13;23;33"),
        ("{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}{% endfor %}", "userassistant"),
    ],
)
def test_what_a_template_has(source, text):
    assert ChatTemplate(source, {}).render(MESSAGES, variables={"messages": [], "thinking": True}).text == text


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
    with pytest.raises(InputError, match=rf"^The chat template cannot be compiled \({kind}: "):
        ChatTemplate(source, {})
