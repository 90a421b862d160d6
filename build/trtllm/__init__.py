"""Facts of TensorRT-LLM as data: `trtllm-build` flags, LLM-API fields and container images.

The package imports nothing of TensorRT-LLM. Builds belong to `targets/`.
"""
