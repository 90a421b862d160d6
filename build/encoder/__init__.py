"""Text encoders (BERT and its kin) -> an engine folder that gives vectors, or scores to pairs of texts.

Models that generate belong to `targets/`.
"""

from llmops.build.encoder.encoder_checkpoint import EncoderCheckpoint, open_encoder
from llmops.build.encoder.encoder_target import EncoderTarget

target = EncoderTarget()

__all__ = ["EncoderCheckpoint", "EncoderTarget", "open_encoder", "target"]
