from __future__ import annotations

import sys
import types

from tests.support.model_code import version_folder

# the models' own code, as Triton's stub finds it
for name in ("preprocessing", "tensorrt_llm", "postprocessing"):
    sys.path.append(str(version_folder(name)))

# Triton's module exists only inside Triton; what is tested outside needs its name alone
sys.modules.setdefault("triton_python_backend_utils", types.SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1))
