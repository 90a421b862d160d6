"""A ModelOpt Hugging Face export, read back: transformers itself does not know quant_method `modelopt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from llmops.build.quantize.reading import ExportedModel, InputRounding, StoredLinear

_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale")
_INPUT_KINDS = {"FP8": "e4m3", "W4A8_AWQ": "e4m3", "FP8_PER_CHANNEL_PER_TOKEN": "e4m3_token"}
# older names on disk -> the modules of transformers 5
_RENAMES = (("block_sparse_moe.", "mlp."),)


class HfFiles:
    """The export in `folder`. Raises BuildError when the files do not fit together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        path = folder / "hf_quant_config.json"
        self.quantization: dict[str, Any] = json.loads(path.read_text())["quantization"] if path.is_file() else {}
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors.update(load_file(file))

    def model(self, bounds: bool = True) -> ExportedModel:
        """Everything, in float32."""
        model = ExportedModel()
        for name, tensor in self.tensors.items():
            if not name.endswith(_SUFFIXES):
                self._weight(model, name, tensor, bounds)
        return model

    def _weight(self, model: ExportedModel, name: str, tensor: Tensor, bounds: bool) -> None:
        module = name.rpartition(".")[0]
        get = self.tensors.get
        prequant = get(f"{module}.pre_quant_scale")
        stored = StoredLinear(tensor)
        if name.endswith(".weight") and f"{module}.weight_scale" in self.tensors:
            stored = StoredLinear(tensor, get(f"{module}.weight_scale"), prequant)
            self._input(model, module, prequant)
        model.put(_renamed(name), [stored.part(bounds)])

    def _input(self, model: ExportedModel, module: str, prequant: Tensor | None) -> None:
        kind = _INPUT_KINDS.get(str(self.quantization.get("quant_algo")))
        if kind is not None:
            scale = self.tensors.get(f"{module}.input_scale")
            model.inputs[_renamed(module)] = InputRounding(kind, scale, prequant)
        for side in ("k", "v"):
            scale = self.tensors.get(f"{module}.{side}_scale")
            if scale is not None:
                model.kv_scales[_renamed(module)] = ("e4m3", scale.float())


def _renamed(name: str) -> str:
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name
