"""Tools that turn a checkpoint into an OpenAI endpoint on NVIDIA Triton + TensorRT-LLM.

The modules directly in this package are used by more than one of its folders. docs/architecture.md
lists the folders.
"""

import sys

__version__ = "0.1.0"

# `import openvino` starts a process that reports the import to Google Analytics. OpenVINO uses its
# silent stub when this package cannot be imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
