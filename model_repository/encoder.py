"""NAME-embedding: the one Triton model of an encoder engine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.contract import CARD, EMBEDDING, EMBEDDING_INPUTS, EMBEDDING_VECTOR
from llmops.model_repository.pbtxt import render_config

MAX_QUEUE_SIZE = 4096


def is_encoder(manifest: EngineManifest) -> bool:
    """Whether the engine gives vectors instead of tokens."""
    return "embedding" in manifest.extra


def embedding_config(name: str, directory: Path, manifest: EngineManifest) -> str:
    """config.pbtxt of NAME-embedding."""
    limits, model = manifest.limits, directory / manifest.model_dir / "openvino_model.xml"
    values = {
        "name": name + EMBEDDING,
        "max_batch_size": limits.max_batch_size,
        "max_queue_size": MAX_QUEUE_SIZE,
        "inputs": EMBEDDING_INPUTS,
        "outputs": [replace(EMBEDDING_VECTOR, dims=(manifest.extra["embedding"]["dimensions"],))],
        "parameters": {
            "model_path": str(model),
            "vocab_size": str(manifest.tokenizer.vocab_size),
            "max_seq_len": str(limits.max_seq_len),
            "max_batch_size": str(limits.max_batch_size),
            CARD: json.dumps(_card(name, directory, manifest)),
        },
    }
    return render_config("embedding", values)


def _card(name: str, directory: Path, manifest: EngineManifest) -> dict[str, object]:
    return {
        "contract": 1,
        "kind": "embedding",
        "name": name,
        "target": manifest.target,
        "tokenizer_dir": str(directory / manifest.tokenizer.directory),
        "max_batch_size": manifest.limits.max_batch_size,
        "max_seq_len": manifest.limits.max_seq_len,
        "vocab_size": manifest.tokenizer.vocab_size,
        "dimensions": manifest.extra["embedding"]["dimensions"],
        "built": int(time.time()),
    }
