"""Describe checkpoints without loading a weight: `open_checkpoint(ref)` returns a `Checkpoint`.

Architectures belong to `model/`, and quantised weights to `quantize/`.
"""

from llmops.build.checkpoint.description import (
    Checkpoint,
    CheckpointFile,
    ExistingQuantisation,
    SpecialTokens,
    TensorInfo,
)
from llmops.build.checkpoint.opening import describe_config, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "ExistingQuantisation",
    "SpecialTokens",
    "TensorInfo",
    "describe_config",
    "open_checkpoint",
]
