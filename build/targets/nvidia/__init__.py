"""Code that the targets tensorrt and pytorch share: request, quantisation, stages, estimates.

NVIDIA's facts about TensorRT-LLM belong to `build/trtllm/`.
"""
