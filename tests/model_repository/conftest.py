from __future__ import annotations

import sys
from pathlib import Path

# the models' own code, as Triton's stub finds it
MODELS = Path(__file__).parents[2] / "model_repository"
for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
    sys.path.append(str(MODELS / name / "1"))
