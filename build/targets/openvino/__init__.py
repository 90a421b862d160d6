"""Target openvino: build OpenVINO IR for GenAI's continuous batching on any x86 CPU.

The runtime inside Triton belongs to the engine model's `runtimes/`.
"""

from llmops.build.targets.openvino.openvino_target import OpenVinoTarget

target = OpenVinoTarget()

__all__ = ["OpenVinoTarget", "target"]
