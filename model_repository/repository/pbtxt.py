"""config.pbtxt: rendered by Jinja2, checked against Triton's own protobuf schema before anyone sees it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jinja2

from llmops.errors import InputError

TEMPLATE_DIR = Path(__file__).parents[1]


def render_config(template: str, values: dict[str, Any]) -> str:
    """Render `<template>/config.pbtxt.j2`; a value that is missing is an error, not an empty string."""
    text = _environment().get_template(f"{template}/config.pbtxt.j2").render(values)
    parse_config(text, f"{template}/config.pbtxt.j2")
    return text


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE_DIR),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["quoted"] = quote
    return environment


def quote(value: object) -> str:
    """A protobuf text string. JSON's escapes are a subset of protobuf's when the text is ASCII, save for surrogates."""
    text = str(value)
    plain = json.dumps(text) if text.isascii() else '"' + "".join(_escape(char) for char in text) + '"'
    return plain.replace("\\u007f", "\\177")


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1] if char.isascii() else "".join(f"\\{byte:03o}" for byte in char.encode())


def parse_config(text: str, source: str) -> Any:
    """The `ModelConfig` message. Raises InputError with file, line and column of what Triton would not accept."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise InputError(
            f"{source} is not a Triton model configuration ({error}); make the repository again."
        ) from error
