"""What is in a checkpoint, without loading a weight: `open_checkpoint(ref)` -> `Checkpoint`.

What a model of that architecture is belongs to `model/`; reading quantised weights to `quantize/`.
"""

from llmops.build.checkpoint.description import (
    Checkpoint,
    CheckpointFile,
    ExistingQuantisation,
    SpecialTokens,
    TensorInfo,
)
from llmops.build.checkpoint.opening import describe, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "ExistingQuantisation",
    "SpecialTokens",
    "TensorInfo",
    "describe",
    "open_checkpoint",
]
