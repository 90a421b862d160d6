"""Target tensorrt: build engines with `trtllm-build` for NVIDIA's C++ backend, up to 1.2.

Code that target pytorch shares is in `targets/nvidia/`.
"""

from llmops.build.targets.tensorrt.tensorrt_target import TensorrtTarget

target = TensorrtTarget()

__all__ = ["TensorrtTarget", "target"]
