"""The Triton model of an encoder engine: NAME-embedding or NAME-score."""

import json
import time
from dataclasses import replace
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.engine_folder.manifest_extras import CrossEncoderExtra, EncoderExtra
from llmops.contract import (
    EMBEDDING_INPUTS,
    EMBEDDING_SUFFIX,
    EMBEDDING_VECTOR,
    METADATA_PARAMETER,
    SCORE_INPUTS,
    SCORE_SUFFIX,
    SCORE_VALUE,
)
from llmops.model_repository.repository.pbtxt import render_config

#: Maximum number of requests in Triton's queue for the model. Triton rejects more, so that clients
#: retry elsewhere instead of waiting long.
MAX_QUEUE_SIZE = 4096


def is_encoder(manifest: EngineManifest) -> bool:
    """Return True if the engine returns vectors or scores instead of tokens."""
    return isinstance(manifest.extra, EncoderExtra | CrossEncoderExtra)


def is_cross_encoder(manifest: EngineManifest) -> bool:
    """Return True if the engine reads two texts together and returns one score."""
    return isinstance(manifest.extra, CrossEncoderExtra)


def encoder_model_name(name: str, manifest: EngineManifest) -> str:
    """Return the name of an encoder's Triton model."""
    return name + (SCORE_SUFFIX if is_cross_encoder(manifest) else EMBEDDING_SUFFIX)


def encoder_config(name: str, directory: Path, manifest: EngineManifest) -> str:
    """Return the config.pbtxt of an encoder's Triton model."""
    limits, model = manifest.limits, directory / manifest.model_dir / "openvino_model.xml"
    scores = is_cross_encoder(manifest)
    values = {
        "name": encoder_model_name(name, manifest),
        "max_batch_size": limits.max_batch_size,
        "max_queue_size": MAX_QUEUE_SIZE,
        "inputs": SCORE_INPUTS if scores else EMBEDDING_INPUTS,
        "outputs": [replace(SCORE_VALUE if scores else EMBEDDING_VECTOR, dims=(_width(manifest),))],
        "parameters": {
            "model_path": str(model),
            "vocab_size": str(manifest.tokenizer.vocab_size),
            "max_seq_len": str(limits.max_seq_len),
            "max_batch_size": str(limits.max_batch_size),
            "type_vocab_size": str(_token_types(manifest)),
            METADATA_PARAMETER: json.dumps(_metadata(name, directory, manifest)),
        },
    }
    return render_config("embedding", values)


def _metadata(name: str, directory: Path, manifest: EngineManifest) -> dict[str, object]:
    return {
        "contract": 1,
        "kind": "score" if is_cross_encoder(manifest) else "embedding",
        "name": name,
        "target": manifest.target,
        "tokenizer_dir": str(directory / manifest.tokenizer.directory),
        "max_batch_size": manifest.limits.max_batch_size,
        "max_seq_len": manifest.limits.max_seq_len,
        "vocab_size": manifest.tokenizer.vocab_size,
        "dimensions": _width(manifest),
        "built": int(time.time()),
    }


def _width(manifest: EngineManifest) -> int:
    """Return the length of the response for each row: of the vector, or 1 for a score."""
    return 1 if is_cross_encoder(manifest) else manifest.extra_as(EncoderExtra).embedding.dimensions


def _token_types(manifest: EngineManifest) -> int:
    """Return the number of token types: 1 for encoders of vectors, which read a single text."""
    return manifest.extra.score.token_types if isinstance(manifest.extra, CrossEncoderExtra) else 1
