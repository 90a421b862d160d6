"""The limit of chat templates, and the tags that Jinja itself lacks, as transformers has them."""

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

#: Maximum length of a template, in characters. The longest known templates have 30,000.
MAX_TEMPLATE_CHARACTERS = 1 << 17


class GenerationTag(Extension):
    """A Jinja extension with the tag `{% generation %} … {% endgeneration %}`.

    Templates mark assistant text for training with the tag. Only the tag's body is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
