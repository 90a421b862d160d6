"""What TensorRT-LLM accepts, as data: `trtllm-build` flags, LLM-API fields, container images. Imports nothing of it."""
