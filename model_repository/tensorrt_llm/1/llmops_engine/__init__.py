"""The engine model's own code. Runs inside Triton: numpy, triton_python_backend_utils and one runtime library.

What it shares with the gateway is copied beside it: the tensor contract, turns and block names.
"""

import sys

# `import openvino` reports itself to Google Analytics from a process of its own. OpenVINO uses
# its silent stub when this package cannot be imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
