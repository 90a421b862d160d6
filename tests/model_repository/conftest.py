from __future__ import annotations

import sys
import types
from pathlib import Path

# the models' own code, as Triton's stub finds it
MODELS = Path(__file__).parents[2] / "model_repository"
for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
    sys.path.append(str(MODELS / name / "1"))

# Triton's module exists only inside Triton; what is tested outside needs its name alone
sys.modules.setdefault("triton_python_backend_utils", types.SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1))
