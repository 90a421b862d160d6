"""Load a checkpoint as a transformers model and tokenizer.

The model is loaded on the GPUs of this machine, or in float32 on the CPU.
"""

import contextlib
import ctypes
import gc
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.file_checks import copy_checked
from llmops.build.checkpoint.weight_sources import TEXT_PARTS, open_weights
from llmops.build.environment import installed_version
from llmops.build.tokenizer import write_tokenizer
from llmops.distribution import missing_extra
from llmops.errors import CheckpointError, ResourceError
from llmops.input_files import MALFORMED


@contextlib.contextmanager
def silence_libraries() -> Iterator[None]:
    """Suppress progress bars, tables and notes of transformers and ModelOpt inside the block."""
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


#: The release of ModelOpt whose exports this package checks and corrects. Other releases write
#: other files.
MODELOPT = "0.47"


def require_quantize_extra() -> None:
    """Check that torch, transformers and the right ModelOpt are installed.

    Raises:
        MissingDependencyError: A library is missing, or ModelOpt is not of the release MODELOPT.
    """
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "modelopt") if find_spec(name) is None]
    if missing:
        raise missing_extra(f"Quantising needs {', '.join(missing)}, which is not installed", "quantize")
    found = installed_version("nvidia-modelopt")
    if found.split(".")[:2] != MODELOPT.split("."):
        raise missing_extra(
            f"Quantising needs ModelOpt {MODELOPT}, and {found or 'another one'} is installed, as in NVIDIA's images "
            "(Dockerfile.build makes an image with the right one)",
            "quantize",
        )


def import_libraries() -> None:
    """Import ModelOpt. Callers must not hold a model in a local variable.

    ModelOpt imports pulp, which keeps the traceback of a failed import, and with the traceback the
    frames of all callers. A model in such a frame would never be freed.
    """
    with silence_libraries():
        import modelopt.torch.export
        import modelopt.torch.quantization  # noqa: F401


def release_memory() -> None:
    """Return freed memory to the system.

    The allocator of glibc keeps the freed memory of a model's tensors in pieces, into which the
    next model does not fit.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def has_gpu() -> bool:
    """Return True if torch can use a GPU."""
    import torch

    return bool(torch.cuda.is_available())


#: Parts of the messages of CUDA, torch's allocator and cuBLAS about a GPU without free memory.
_GPU_IS_FULL = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextlib.contextmanager
def report_full_gpu() -> Iterator[None]:
    """Convert any "out of memory" error of a GPU inside the block to a ResourceError."""
    try:
        yield
    except RuntimeError as error:
        if not _gpu_is_full(error):
            raise
        raise ResourceError(
            "A GPU has no memory left; end the other processes on it (`nvidia-smi` lists them), use more GPUs, or "
            "set CUDA_VISIBLE_DEVICES=-1 to use the CPU."
        ) from error


def _gpu_is_full(error: RuntimeError) -> bool:
    return any(text in str(error) for text in _GPU_IS_FULL)


@contextlib.contextmanager
def report_unreadable(ref: str) -> Iterator[None]:
    """Convert errors of transformers about the files of `ref` inside the block to a CheckpointError."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (ImportError, OSError, RuntimeError, StrictDataclassError, *MALFORMED) as error:
        if isinstance(error, RuntimeError) and _gpu_is_full(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{ref} cannot be loaded by transformers ({reason}); use another checkpoint.") from error


def load_model(checkpoint: Checkpoint) -> Any:
    """Return the causal language model in evaluation mode.

    Raises:
        CheckpointError: transformers cannot load the checkpoint.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    if checkpoint.format == "gguf":
        return _from_gguf(checkpoint)
    kwargs: dict[str, Any] = {"device_map": "auto", "dtype": "auto"} if has_gpu() else {"dtype": torch.float32}
    if (checkpoint.path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{checkpoint.ref} has an adapter_config.json, by which transformers would change its weights; remove it."
        )
    # Without the argument, a pytorch_model.bin is read where no safetensors file has the usual name.
    kwargs["use_safetensors"] = True
    hf_class = checkpoint.architecture.hf_class
    if with_encoders := hf_class == "Gemma3ForConditionalGeneration":
        hf_class = "Gemma3ForCausalLM"
        kwargs["key_mapping"] = {f"^{re.escape(one)}": "model." for one in TEXT_PARTS}
    kwargs["config"] = (read_hf_config if with_encoders else _read_config)(checkpoint.path)
    with report_unreadable(checkpoint.ref), silence_libraries():
        model = AutoModelForCausalLM.from_pretrained(checkpoint.path, trust_remote_code=False, **kwargs)
    model.config.architectures = [hf_class]
    # transformers opened generation_config.json again, which need not be the file that was checked.
    if (given := checkpoint.generation_config) or not model.generation_config._from_model_config:
        model.generation_config = GenerationConfig.from_dict(given)
    if with_encoders:
        model._weight_conversions = []  # without conversions, the weights are saved under new names
    return model.eval()


def _from_gguf(checkpoint: Checkpoint) -> Any:
    """Load a GGUF file without transformers' own loader.

    The loader of transformers parses the vocabulary three times, which takes seconds each time, and
    holds all weights twice.
    """
    import numpy as np
    import torch

    weights = open_weights(checkpoint)
    model = empty_model(source_config(checkpoint))
    for name in parameter_names(model):
        weight = weights.get(name, tuple(model.get_parameter(name).shape)).float32()
        put_parameter(model, name, torch.from_numpy(np.require(weight, requirements=["C", "W"])))
    model.tie_weights()
    return (_on_gpus(model.to(torch.bfloat16)) if has_gpu() else model).eval()


def _on_gpus(model: Any) -> Any:
    """Distribute a model over all GPUs, like transformers with device_map "auto"."""
    import torch

    if torch.cuda.device_count() == 1:
        return model.to("cuda")
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = model._no_split_modules
    memory = get_balanced_memory(model, dtype=torch.bfloat16, no_split_module_classes=whole)
    places = infer_auto_device_map(model, memory, no_split_module_classes=whole, dtype=torch.bfloat16)
    return dispatch_model(model, places)


def source_config(checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's transformers config without its quantisation."""
    from transformers import AutoConfig

    if checkpoint.format != "gguf":
        return read_hf_config(checkpoint.path)
    special = checkpoint.special_tokens
    ids = {"bos_token_id": special.bos, "eos_token_id": list(special.end) or None, "pad_token_id": special.pad}
    fields = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    with report_unreadable(checkpoint.ref):
        return AutoConfig.for_model(checkpoint.config["model_type"], **fields, **ids)


def read_hf_config(folder: Path) -> Any:
    """Return the transformers config of a Hugging Face folder without its quantisation.

    For Gemma 3 with encoders, the result is the config of the text part, because only this part is
    quantised.
    """
    config = _read_config(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config.text_config if config.model_type == "gemma3" else config


def _read_config(folder: Path) -> Any:
    """Return the transformers config of a Hugging Face folder, with the standard attention.

    Checkpoints may name another implementation, for which transformers imports a package or
    downloads a kernel of any repository.
    """
    from transformers import AutoConfig

    with report_unreadable(str(folder)), silence_libraries():
        # transformers would open a file by its path, which may lead elsewhere by then.
        with tempfile.TemporaryDirectory() as copies:
            copy_checked(folder / "config.json", Path(copies, "config.json"))
            config = AutoConfig.from_pretrained(copies, trust_remote_code=False)
        config._name_or_path = str(folder)
        config._attn_implementation = None
    return config


def empty_model(config: Any) -> Any:
    """Return a float32 model whose parameters take no memory until `put_parameter` replaces them."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with report_unreadable("config.json"), silence_libraries(), init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def parameter_names(model: Any) -> list[str]:
    """Return the names of all parameters, without an output matrix that is the embedding itself."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return [name for name, _ in model.named_parameters() if name not in tied]


def put_parameter(model: Any, name: str, value: Any) -> None:
    """Replace the parameter `name` of a module."""
    import torch

    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, torch.nn.Parameter(value, requires_grad=False))


def load_tokenizer(checkpoint: Checkpoint, written: Path | None = None) -> Any:
    """Return the tokenizer, loaded from the tokenizer files of the engine.

    transformers loads these files unchanged. From the files of some checkpoints, such as DeepSeek's
    distilled Llamas, transformers would build a tokenizer with other ids. `written` is the folder
    of the engine's tokenizer files, if the files exist already.
    """
    from transformers import AutoTokenizer

    if written is None:
        with tempfile.TemporaryDirectory(prefix="llmops-tokenizer-") as scratch:
            write_tokenizer(checkpoint, Path(scratch) / "tokenizer", lambda sentence: None)
            return load_tokenizer(checkpoint, Path(scratch) / "tokenizer")
    with report_unreadable(checkpoint.ref), silence_libraries():
        return AutoTokenizer.from_pretrained(written, trust_remote_code=False)
