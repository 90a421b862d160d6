"""Rendering of config.pbtxt files by Jinja2, and checks against Triton's protobuf schema."""

import functools
import json
from pathlib import Path
from typing import Any

import jinja2

from llmops.errors import InputError

TEMPLATE_DIR = Path(__file__).parents[1]


def render_config(template: str, values: dict[str, Any]) -> str:
    """Render `<template>/config.pbtxt.j2`. A missing value raises an error."""
    path = f"{template}/config.pbtxt.j2"
    text = template_environment(TEMPLATE_DIR).get_template(path).render(values)
    parse_config(text, path)
    return text


@functools.cache
def template_environment(folder: Path) -> jinja2.Environment:
    """Return the environment of the Jinja templates in `folder`.

    The filter `quoted` writes protobuf strings.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quoted"] = quote
    return environment


def quote(value: object) -> str:
    """Return a protobuf text string.

    JSON's escapes of ASCII are a subset of protobuf's, except for surrogates.
    """
    text = str(value)
    plain = json.dumps(text) if text.isascii() else '"' + "".join(_escape(char) for char in text) + '"'
    return plain.replace("\\u007f", "\\177")


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1] if char.isascii() else "".join(f"\\{byte:03o}" for byte in char.encode())


def parse_config(text: str, source: str) -> Any:
    """Return the `ModelConfig` in a text. Raise InputError with the position of an error."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise InputError(
            f"{source} is not a Triton model configuration ({error}); make the repository again."
        ) from error
