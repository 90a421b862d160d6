"""Calibrate and quantise a loaded model in place."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmops.build.quant_formats import QuantFormat
from llmops.build.quantize.calibration import BUNDLED, CalibrationSettings, batches, load_texts, pack_sequences
from llmops.build.quantize.forward_progress import ForwardMeter, forward_cost, layer_progress
from llmops.build.quantize.model_loading import has_gpu, silence_libraries
from llmops.build.quantize.module_fixes import split_experts
from llmops.errors import BuildError

if TYPE_CHECKING:
    import torch

    from llmops.build.progress import Progress


#: Costs of AWQ's two passes over the data, in forward passes. The second (awq_lite) also tries
#: eleven strengths of smoothing.
_AWQ_PASSES = (1, 12)


#: Name of ModelOpt's integer kernels in torch's cache. ModelOpt compiles them in 52 s.
KERNELS = "modelopt_cuda_ext"
COMPILING = "ModelOpt first compiles its integer kernels, once per machine, which takes about a minute."
#: Seconds without a new file after which another build counts as killed. The slowest file compiles
#: in 50 s.
_COMPILE_SECONDS = 180.0


def quantize(
    model: Any,
    tokenizer: Any,
    quant_format: QuantFormat,
    kv_cache: str,
    group_size: int | None,
    settings: CalibrationSettings,
    progress: Progress,
) -> int:
    """Calibrate and quantise `model` in place.

    Returns:
        The number of calibration tokens.

    Raises:
        BuildError: ModelOpt cannot quantise the model, or a scale is not finite.
    """
    import torch

    split_experts(model)
    config = modelopt_config(quant_format, kv_cache, group_size)
    if config is None:
        return 0
    size, batch_size = settings.resolved(has_gpu(), quant_format.calib_limit)
    found = pack_sequences(load_texts(settings), tokenizer, size, settings.seq_len)
    if quant_format.grouped:
        # AWQ gives all batches the same weight, so a short last sequence would count like eight
        # full sequences.
        found = [ids for ids in found if len(ids) == len(found[0])]
    tokens = sum(len(ids) for ids in found)
    passes = _AWQ_PASSES if quant_format.grouped else (1,)
    total = sum(passes) * forward_cost([ids.numel() for ids in batches(found, batch_size)])
    if compiles_kernels(config):
        progress.note(COMPILING)
        _wait_for_other_build()
    with (
        progress.stage(_title(quant_format, len(found), tokens, settings), total), silence_libraries(),
        torch.inference_mode(),
        _bfloat16_products(), layer_progress(model, progress) as meter,
    ):  # fmt: skip
        _run(model, config, _forward_loop(meter, passes, lambda: batches(found, batch_size)))
    _check_finite(model)
    return tokens


def _forward_loop(
    meter: ForwardMeter, passes: tuple[int, ...], prepared: Callable[[], Iterator[torch.Tensor]]
) -> Callable[[Any], None]:
    """Return the function that ModelOpt calls for each pass over the calibration data.

    Args:
        meter: Receives the cost of each pass.
        passes: The costs of the passes in order, in forward passes. The last cost also counts for
            all later passes.
        prepared: Returns the batches of token ids.
    """
    costs = iter(passes)

    def forward(model: Any) -> None:
        meter.cost = next(costs, passes[-1])
        for ids in prepared():
            # Call only the decoder: the output matrix is not quantised. Use no cache, which would
            # keep every key and value.
            model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)

    return forward


def _title(quant_format: QuantFormat, count: int, tokens: int, settings: CalibrationSettings) -> str:
    source = "the bundled texts" if settings.dataset == BUNDLED else settings.dataset
    return f"Calibrating {quant_format.name} on {count} sequences ({tokens} tokens) of {source}"


@contextlib.contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Compute float32 products on a CPU in bfloat16 with float32 sums inside the block.

    bfloat16 halves the time. The error of 0.2 % changes neither the largest values nor the choice
    of a strength of smoothing.
    """
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if has_gpu() else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _run(model: Any, config: dict[str, Any], forward_loop: Callable[[Any], None]) -> None:
    import modelopt.torch.quantization as mtq

    try:
        mtq.quantize(model, config, forward_loop)
    except (NotImplementedError, AssertionError, ValueError) as error:
        raise BuildError(
            f"ModelOpt could not quantise the model: {error}; use another --quant, or report this."
        ) from error


def _check_finite(model: Any) -> None:
    """Raise BuildError if a scale is not finite, because the engine would give wrong answers."""
    import torch

    for name, value in model.named_buffers():
        if name.endswith("_amax") and not torch.isfinite(value).all():
            raise BuildError(
                f"Calibration gave a scale that is not finite at {name}; the checkpoint holds infinity or NaN, or "
                "overflows in its dtype: download it again, or calibrate in float32 on the CPU."
            )


def modelopt_config(quant_format: QuantFormat, kv_cache: str, group_size: int | None) -> dict[str, Any] | None:
    """Return the argument of `mtq.quantize` (ModelOpt 0.47), or None.

    The result is None if nothing is quantised before the export.

    ModelOpt applies the entries of `quant_cfg` from first to last.
    """
    import modelopt.torch.quantization as mtq

    entries = _kv_entries(kv_cache)
    if quant_format.preset is None:
        return (
            {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *entries], "algorithm": "max"} if entries else None
        )
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, quant_format.preset))
    if group_size is not None:
        _set_group_size(config, group_size)
    config["quant_cfg"] = [*config["quant_cfg"], *entries]
    return config


def compiles_kernels(config: dict[str, Any]) -> bool:
    """Return True if ModelOpt will compile kernels for `config`, an argument of `mtq.quantize`.

    ModelOpt compiles kernels for integers on a GPU, if nvcc is installed and torch keeps no kernels
    of an earlier build.
    """
    from torch.utils import cpp_extension

    if not has_gpu() or not any(isinstance(part.get("num_bits"), int) for part in _quantizers(config)):
        return False
    compiler = Path(cpp_extension.CUDA_HOME or "", "bin", "nvcc")
    return os.access(compiler, os.X_OK) and not any(_compiled("*.so"))


def _compiled(pattern: str) -> Iterator[Path]:
    """Return the files of ModelOpt's kernels in torch's cache that match `pattern`."""
    from torch.utils import cpp_extension

    kept = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return kept.glob(f"**/{KERNELS}/{pattern}")


def _wait_for_other_build() -> None:
    """Wait until no other build compiles the kernels, and remove the lock of a killed build.

    torch waits until the lock is removed, which a killed build never does. A process in another
    container is not visible, but it writes files beside the lock.
    """
    for lock in _compiled("lock"):
        with contextlib.suppress(FileNotFoundError):
            while _is_open(lock) or time.time() - lock.parent.stat().st_mtime < _COMPILE_SECONDS:
                lock.stat()
                time.sleep(0.2)
            lock.unlink()


def _is_open(file: Path) -> bool:
    """Return True if a process that is visible here has the file open."""
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if handle.samefile(file):
                return True
    return False


def _set_group_size(config: dict[str, Any], group_size: int) -> None:
    for part in _quantizers(config):
        if "block_sizes" in part:
            part["block_sizes"][-1] = group_size


def _quantizers(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in config["quant_cfg"]:
        cfg = entry.get("cfg")
        yield from (part for part in (cfg if isinstance(cfg, list) else [cfg]) if part)


def _kv_entries(kv_cache: str) -> list[dict[str, Any]]:
    import modelopt.torch.quantization as mtq

    if kv_cache == "fp8":
        return copy.deepcopy(list(mtq.FP8_KV_CFG["quant_cfg"]))
    if kv_cache == "int8":
        return [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}, "enable": True}]
    return []
