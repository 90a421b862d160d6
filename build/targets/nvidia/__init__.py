"""What the tensorrt and the pytorch target share: the request, quantising, stages, resources.

What TensorRT-LLM accepts belongs to `build/trtllm/`.
"""
