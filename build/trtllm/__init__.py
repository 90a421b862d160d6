"""Facts about TensorRT-LLM as data: `trtllm-build` flags, LLM-API fields and container images.

The package imports no module of TensorRT-LLM. Builds belong to `targets/`.
"""
