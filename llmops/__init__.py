"""Checkpoint to OpenAI endpoint on NVIDIA Triton + TensorRT-LLM."""

__version__ = "0.1.0"
