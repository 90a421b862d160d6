"""Tools that turn a checkpoint into an OpenAI endpoint on NVIDIA Triton + TensorRT-LLM.

This package holds what more than one folder needs. docs/architecture.md lists the folders.
"""

import sys

__version__ = "0.1.0"

# `import openvino` reports itself to Google Analytics from a process of its own. OpenVINO uses
# its silent stub when this package cannot be imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
