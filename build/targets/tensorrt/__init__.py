"""Target tensorrt: engines of `trtllm-build` for NVIDIA's C++ backend, on TensorRT-LLM up to 1.2.

Parts shared with target pytorch are in `targets/nvidia/`.
"""

from llmops.build.targets.tensorrt.tensorrt_target import TensorrtTarget

target = TensorrtTarget()

__all__ = ["TensorrtTarget", "target"]
