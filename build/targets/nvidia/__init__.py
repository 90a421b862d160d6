"""Parts shared by the targets tensorrt and pytorch: request, quantising, stages and estimates.

NVIDIA's facts about TensorRT-LLM belong to `build/trtllm/`.
"""
