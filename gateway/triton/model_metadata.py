"""The parameter `llmops_model_metadata`, in which a model describes itself to gateways.

The parameter is part of the model's ModelConfig in Triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmops.contract import CONTRACT_VERSION, METADATA_PARAMETER
from llmops.errors import InputError, first_validation_error
from llmops.gateway.interfaces import ModelMetadata
from llmops.input_files import parse_json

#: Maximum length of the parameter in characters, because it is parsed while requests wait. It has
#: about a thousand characters, and less than a hundred more for each adapter.
MAX_CHARACTERS = 2**20


@dataclass(frozen=True, slots=True)
class EncoderMetadata:
    """The metadata of an encoder model.

    Attributes:
        name: Name of the model for clients.
        target: Build target of the model.
        tokenizer_dir: Folder of the tokenizer.
        max_batch_size: Maximum number of rows in a batch.
        max_seq_len: Maximum length of a row in tokens.
        vocab_size: Number of tokens in the vocabulary.
        dimensions: Numbers per row in the model's output.
        built: Unix time of the build, 0 if unknown.
    """

    name: str
    target: str
    tokenizer_dir: str
    max_batch_size: int
    max_seq_len: int
    vocab_size: int
    dimensions: int
    built: int = 0


_MODEL_ADAPTER, _ENCODER_ADAPTER = TypeAdapter(ModelMetadata), TypeAdapter(EncoderMetadata)


def parse_model_metadata(text: str, overrides: Mapping[str, Any] | None = None) -> ModelMetadata:
    """Return the metadata of a generative model.

    Args:
        text: The parameter's value, a JSON object.
        overrides: Fields that the gateway's settings replace.

    Raises:
        InputError: The text is not valid metadata, or is of another version of the contract.
    """
    with _as_input_error():
        raw = {"target": "unknown", **_parse(text), **(overrides or {})}
        contract = raw.pop("contract", CONTRACT_VERSION)
        metadata = _MODEL_ADAPTER.validate_python(raw)
    if contract != CONTRACT_VERSION:
        raise InputError(
            f"The model speaks contract {contract}, this gateway {CONTRACT_VERSION}; use the same llmops version "
            "for both"
        )
    return metadata


def parse_encoder_metadata(text: str, overrides: Mapping[str, Any]) -> EncoderMetadata:
    """Return the metadata of an encoder.

    Args:
        text: The parameter's value, a JSON object.
        overrides: Fields that the gateway's settings replace.

    Raises:
        InputError: The text is not valid metadata.
    """
    with _as_input_error():
        return _ENCODER_ADAPTER.validate_python({**_parse(text), **overrides})


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, more than the {MAX_CHARACTERS:,} allowed")
    found: dict[str, Any] = parse_json(text or "{}")
    return found


@contextmanager
def _as_input_error() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise InputError(
            f"The model's {METADATA_PARAMETER} cannot be used ({first_validation_error(error)}); "
            "make the repository again with `llmops repo`"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f"The model's {METADATA_PARAMETER} is not a JSON object ({error}); make the repository again with "
            "`llmops repo`"
        ) from error
