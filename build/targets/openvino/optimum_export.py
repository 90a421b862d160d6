"""Export families that the native graph does not cover.

The library optimum-intel traces the transformers model.

This export needs torch and holds the model in memory, so the native graph is preferred.
optimum-intel depends on torchvision, which would install PyTorch for CUDA and is not used here. The
install command therefore has `--no-deps`.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import Checkpoint
from llmops.build.environment import installed_version
from llmops.build.progress import Progress
from llmops.distribution import missing_extra
from llmops.errors import BuildError, MissingDependencyError

_KEPT = {"openvino_model.xml", "openvino_model.bin"}


def check_optimum_installed(checkpoint: Checkpoint) -> None:
    """Raise MissingDependencyError, with the install commands, if the exporter is not installed."""
    for name in ("optimum-intel", "optimum", "nncf", "torch", "transformers"):
        if not installed_version(name):
            what = f"{checkpoint.architecture.hf_class} is exported by optimum-intel, and {name} is not installed"
            raise MissingDependencyError(f"{missing_extra(what, 'export')} && pip install --no-deps optimum-intel")


def write_model(
    checkpoint: Checkpoint, quant: str, group_size: int | None, directory: Path, progress: Progress
) -> None:
    """Write openvino_model.xml and openvino_model.bin.

    Raises:
        BuildError: optimum-intel cannot export the model.
    """
    with progress.stage("Exporting with optimum-intel"), _quiet():
        from optimum.exporters.openvino import main_export

        try:
            main_export(
                str(checkpoint.path),
                output=directory,
                task="text-generation-with-past",
                library_name="transformers",
                ov_config=_config(quant, group_size),
                local_files_only=True,
            )
        except Exception as error:
            hf_class = checkpoint.architecture.hf_class
            raise BuildError(
                f"optimum-intel cannot export {hf_class}: {error}; use another checkpoint, or report this."
            ) from error
    for path in directory.iterdir():
        if path.name not in _KEPT:
            path.unlink()


def _config(quant: str, group_size: int | None) -> Any:
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    if quant == "none":
        # Without a config, optimum-intel would compress models of over a billion parameters to 8
        # bits.
        return OVConfig(dtype="auto")
    if quant == "int8":
        return OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=False))
    scheme = OVWeightQuantizationConfig(bits=4, sym=False, group_size=group_size or 128, ratio=1.0)
    return OVConfig(quantization_config=scheme)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of the tracing, which are of no use to users."""
    root = logging.getLogger()
    level = root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root.setLevel(logging.ERROR)
        try:
            yield
        finally:
            root.setLevel(level)
