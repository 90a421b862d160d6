"""Calibrate and quantise a loaded model in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmops.build.quantize.calibration import CalibrationSettings, batches, load_texts
from llmops.build.quantize.experts import split_experts
from llmops.build.quantize.formats import Format
from llmops.build.quantize.loading import quiet
from llmops.build.quantize.presets import modelopt_config
from llmops.errors import BuildError

if TYPE_CHECKING:
    from llmops.build.targets.base import Progress


def quantize(
    model: Any,
    tokenizer: Any,
    form: Format,
    kv_cache: str,
    group_size: int | None,
    settings: CalibrationSettings,
    progress: Progress,
) -> int:
    """Quantise `model` in place with calibration; returns the number of calibration tokens. Raises BuildError."""
    import torch

    split_experts(model)
    config = modelopt_config(form, kv_cache, group_size)
    if config is None:
        return 0
    texts = load_texts(settings)
    prepared = list(batches(texts, tokenizer, settings))
    tokens = sum(int(batch["attention_mask"].sum()) for batch in prepared)
    passes = 2 if form.name in ("int4_awq", "w4a8_awq") else 1
    title = f"Calibrating {form.name} on {len(texts)} texts"
    with progress.stage(title, total=len(prepared) * passes), quiet(), torch.inference_mode():
        _run(model, config, prepared, progress)
    _check_finite(model)
    return tokens


def _run(model: Any, config: dict[str, Any], prepared: list[Any], progress: Progress) -> None:
    import modelopt.torch.quantization as mtq

    def forward_loop(target: Any) -> None:
        for batch in prepared:
            # only the activations matter; a cache would keep every key and value
            target(**{name: value.to(target.device) for name, value in batch.items()}, use_cache=False)
            progress.advance()

    try:
        mtq.quantize(model, config, forward_loop)
    except (NotImplementedError, AssertionError, ValueError) as error:
        raise BuildError(f"ModelOpt could not quantise the model: {error}") from error


def _check_finite(model: Any) -> None:
    """A scale that is not a number makes an engine that only says so in its answers."""
    import torch

    for name, value in model.named_buffers():
        if name.endswith("_amax") and not torch.isfinite(value).all():
            raise BuildError(
                f"calibration gave a scale that is not finite at {name}; the checkpoint holds infinities or NaN, or "
                "overflows in its dtype: check it, or calibrate in float32 on the CPU."
            )
