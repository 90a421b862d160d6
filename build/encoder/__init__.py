"""Text encoders (BERT and its kin) → an engine folder that serves embeddings. `open_encoder`, `build_encoder`."""

from llmops.build.encoder.checkpoint import EncoderCheckpoint, open_encoder
from llmops.build.encoder.engine import build_encoder

__all__ = ["EncoderCheckpoint", "build_encoder", "open_encoder"]
