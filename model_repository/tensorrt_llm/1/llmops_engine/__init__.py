"""The engine model's own code.

It runs inside Triton with numpy, triton_python_backend_utils and one runtime library.

The modules that it shares with the gateway are copied beside it: `llmops_contract`,
`llmops_kv_blocks`, `llmops_process` and `llmops_round_robin`.
"""

import sys

# `import openvino` reports itself to Google Analytics from a process of its own. OpenVINO uses
# its silent stub when this package cannot be imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
