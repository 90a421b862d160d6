"""A checkpoint -> a transformers model and its tokenizer, on the GPUs if there are any, else in float32 on the CPU."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.errors import CheckpointError, MissingDependencyError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers and ModelOpt print bars, tables and notes that belong to their developers."""
    import io

    from transformers.utils import logging as hf_logging

    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def require_quantize_extra() -> None:
    """Raises MissingDependencyError unless torch, transformers and ModelOpt are there."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "modelopt") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"Quantising needs {', '.join(missing)}, which is not installed: pip install 'llmops[quantize]'."
        )


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def load_model(checkpoint: Checkpoint) -> Any:
    """The causal language model in evaluation mode. Raises CheckpointError when transformers cannot load it."""
    import torch
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {"device_map": "auto", "dtype": "auto"} if has_gpu() else {"dtype": torch.float32}
    path, extra = _source(checkpoint)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(path, **kwargs, **extra)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.ref} cannot be loaded by transformers: {error}") from error
    # a dequantised GGUF still says how it was stored, and the export would repeat it
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [checkpoint.architecture.hf_class]
    return model.eval()


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    path, extra = _source(checkpoint)
    extra.pop("quantization_config", None)
    with quiet():
        return AutoTokenizer.from_pretrained(path, **extra)


def _source(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    if checkpoint.format != "gguf":
        return str(checkpoint.path), {}
    # newer releases keep GGUF blocks packed unless told otherwise; 5.5 always unpacks them
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": config(dequantize=True)} if config is not None else {}
    return str(checkpoint.path.parent), {"gguf_file": checkpoint.path.name, **unpack}
