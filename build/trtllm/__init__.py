"""What TensorRT-LLM accepts, as data: `trtllm-build` flags, LLM-API fields, container images.

Imports nothing of it; what is made of these belongs to `targets/` and to `model_repository/targets/`.
"""
