"""The bundled model in PyTorch float32: the independent reference for tokens and log-probs."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def load_model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from llmops.build.checkpoint.known_models import bundled_path

    file = bundled_path("smollm2")
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
