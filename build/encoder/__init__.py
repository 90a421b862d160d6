"""Build engines of text encoders (BERT and related models).

Such an engine returns vectors, or scores of text pairs.

Models that generate text belong to `targets/`.
"""

from llmops.build.encoder.encoder_checkpoint import EncoderCheckpoint, is_encoder, open_encoder
from llmops.build.encoder.encoder_target import EncoderTarget

target = EncoderTarget()

__all__ = ["EncoderCheckpoint", "EncoderTarget", "is_encoder", "open_encoder", "target"]
