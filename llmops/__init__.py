"""Checkpoint to OpenAI endpoint on NVIDIA Triton + TensorRT-LLM.

Here: only what more than one folder needs. Everything else has a folder of its own: docs/structure.md.
"""

__version__ = "0.1.0"
