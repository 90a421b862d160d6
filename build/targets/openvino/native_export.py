"""Write a checkpoint as OpenVINO IR without torch.

Weights are read one by one and written by OpenVINO.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmops.build.checkpoint import Checkpoint
from llmops.build.checkpoint.weight_sources import WeightSource, open_weights
from llmops.build.progress import Progress
from llmops.build.targets.openvino.decoder_graph import DecoderShape, build_decoder
from llmops.build.targets.openvino.rope import inverse_frequencies
from llmops.build.targets.openvino.weight_compression import (
    Int4Storage,
    Int8Storage,
    UncompressedStorage,
    WeightStorage,
)
from llmops.errors import BuildError, CheckpointError


def write_model(
    checkpoint: Checkpoint, quant: str, group_size: int | None, directory: Path, progress: Progress
) -> None:
    """Write openvino_model.xml and openvino_model.bin."""
    # The model's constants point into both objects, which must exist until the model is written.
    weights, storage = open_weights(checkpoint), _storage(quant, group_size)
    with progress.stage("Reading weights", total=checkpoint.architecture.num_layers):
        model = build_decoder(_shape(checkpoint, weights), weights, storage, progress.advance)
    with progress.stage("Writing the model"):
        _save(model, directory / "openvino_model.xml")
    del model, weights, storage


@contextlib.contextmanager
def float_model(checkpoint: Checkpoint) -> Iterator[ov.Model]:
    """Yield the decoder with the checkpoint's unquantised weights.

    The constants of the model are invalid after the block.
    """
    weights, storage = open_weights(checkpoint), UncompressedStorage()
    yield build_decoder(_shape(checkpoint, weights), weights, storage)
    del weights, storage


def _shape(checkpoint: Checkpoint, weights: WeightSource) -> DecoderShape:
    epsilon = checkpoint.config.get("rms_norm_eps")
    return DecoderShape(
        architecture=checkpoint.architecture,
        rms_norm_eps=1e-6 if epsilon is None else float(epsilon),
        inverse_frequencies=_frequencies(checkpoint, weights),
    )


def _frequencies(checkpoint: Checkpoint, weights: WeightSource) -> NDArray[np.float32]:
    """Return the inverse frequencies of the rotary embedding.

    GGUF files of Llama 3.1 and later store the RoPE scaling as a tensor of divisors.
    """
    frequencies = inverse_frequencies(checkpoint.config, checkpoint.architecture.head_dim)
    name = "rope_freqs.weight"
    if not weights.has(name):
        return frequencies
    divisors = weights.get(name, frequencies.shape).float32()
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise CheckpointError(f"{checkpoint.ref} has a {name} that is not positive numbers; download it again.")
    return frequencies / divisors


#: Free bytes on the disk below which a failed write counts as "disk full".
_MIN_FREE = 1 << 20


def _save(model: ov.Model, path: Path) -> None:
    try:
        ov.save_model(model, path, compress_to_fp16=False)
    # OpenVINO's error of a failed write does not say that the disk is full.
    except RuntimeError as error:
        if shutil.disk_usage(path.parent).free < _MIN_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise BuildError(
            f"OpenVINO could not write the model ({error}); build again, and report this if it fails again."
        ) from error


def _storage(quant: str, group_size: int | None) -> WeightStorage:
    if quant == "int8":
        return Int8Storage()
    return Int4Storage(group_size or 128) if quant == "int4" else UncompressedStorage()
