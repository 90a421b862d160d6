"""Which parser a model's chat template asks for."""

from __future__ import annotations

from llmops.gateway.answers.parsers.base import ToolParser
from llmops.gateway.answers.parsers.deepseek import DeepSeekParser, KimiParser
from llmops.gateway.answers.parsers.hermes import HermesParser
from llmops.gateway.answers.parsers.llama3 import Llama3Parser
from llmops.gateway.answers.parsers.mistral import MistralParser
from llmops.gateway.answers.parsers.pythonic import PythonicParser
from llmops.gateway.answers.parsers.tagged import GlmParser, QwenCoderParser

PARSERS: dict[str, type[ToolParser]] = {
    "deepseek": DeepSeekParser,
    "glm": GlmParser,
    "hermes": HermesParser,
    "kimi": KimiParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen_coder": QwenCoderParser,
}

# In this order: what a template says about the form of calls, most telling first. `<tool_call>` stands around
# other things than JSON too, and a template must not get the wrong parser.
_SIGNS: tuple[tuple[str, str | None], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"),
    ("<function=", "qwen_coder"),
    ("<arg_key>", "glm"),
    ("<｜DSML｜", None),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("[func_name(", "pythonic"),
    ('"parameters": dictionary of argument name', "llama3"),
    ("<|python_tag|>", "llama3"),
)


def knows_tools(template: str) -> bool:
    """Whether the template renders `tools` at all."""
    return "tools" in template


def family_of(template: str) -> str | None:
    """The name of the parser for `template`; None if its calls have a form that none of them reads.

    A template that knows no tools is prompted in Hermes' form (`prompting`), so it is answered in it.
    """
    if not knows_tools(template):
        return "hermes"
    return next((family for sign, family in _SIGNS if sign in template), None)
