"""A quantised Hugging Face checkpoint, read back: transformers knows some formats only, and those on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from llmops.build.quantize.reading import ExportedModel, StoredLinear
from llmops.build.quantize.stored import LayerReader, reader_of

# older names on disk -> the modules of transformers 5
_RENAMES = (("block_sparse_moe.", "mlp."),)


class HfFiles:
    """The checkpoint in `folder`. Raises InputError for a format that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.config = _json(folder / "config.json")
        self.reader = check_readable(folder)
        self.modules: dict[str, dict[str, Tensor]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                module, _, last = _renamed(name).rpartition(".")
                self.modules.setdefault(module, {})[last] = tensor

    def model(self, bounds: bool = True) -> ExportedModel:
        """Everything, in float32. `bounds` are known for ModelOpt's formats only."""
        model = ExportedModel()
        for module, stored in self.modules.items():
            self._layer(model, module, stored, bounds)
        return model

    def _layer(self, model: ExportedModel, module: str, stored: dict[str, Tensor], bounds: bool) -> None:
        quantised = self.reader.quantised(stored)
        if quantised:
            model.put(f"{module}.weight", [self.reader.part(stored, bounds)])
            rounding = self.reader.rounding(stored)
            if rounding is not None:
                model.inputs[module] = rounding
        for name, tensor in stored.items():
            if name not in self.reader.names and not (quantised and name == "weight"):
                model.put(f"{module}.{name}", [StoredLinear(tensor).part(bounds)])
        for side in ("k", "v"):
            if f"{side}_scale" in stored and module.endswith(f"{side}_proj"):
                model.kv_scales[module] = ("e4m3", stored[f"{side}_scale"].float())


def check_readable(folder: Path) -> LayerReader:
    """The reader of its format, before any weight is touched. Raises InputError."""
    modelopt = folder / "hf_quant_config.json"
    return reader_of(_json(folder / "config.json"), _json(modelopt)["quantization"] if modelopt.is_file() else {})


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _renamed(name: str) -> str:
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name
