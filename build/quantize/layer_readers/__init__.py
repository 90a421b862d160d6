"""How quantised Hugging Face checkpoints store a linear layer, one format per file; `reader_of` picks the one.

How we write one belongs to `quantize/` itself.
"""

from llmops.build.quantize.layer_readers.reader_interface import LayerReader, Stored
from llmops.build.quantize.layer_readers.reader_registry import reader_of

__all__ = ["LayerReader", "Stored", "reader_of"]
