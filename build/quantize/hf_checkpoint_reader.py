"""Read a quantised Hugging Face checkpoint back.

The library transformers reads only some of the formats, and only on GPUs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor

from llmops.build.checkpoint.file_checks import read_json
from llmops.build.checkpoint.safetensors_header import read_headers
from llmops.build.quantize.embedding_tables import TABLES, DenseTable, EmbeddingTable, stored_table
from llmops.build.quantize.exported_weights import ExportedModel, QuantizedLinear
from llmops.build.quantize.layer_readers import LayerReader, reader_of

#: Older names of modules on disk -> their names in transformers 5.
_RENAMES = (("block_sparse_moe.", "mlp."),)


class HfCheckpointReader:
    """A reader of the checkpoint in `folder`. Tensors are read when requested.

    Raises:
        InputError: The format is unknown.
    """

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        self.reader = check_format_readable(folder)
        # Module -> last part of the tensor's name -> file, and name in the file.
        self.modules: dict[str, dict[str, tuple[Path, str]]] = {}
        for name, info in read_headers(folder, sorted(path.name for path in folder.glob("*.safetensors"))).items():
            module, _, last = _renamed(name).rpartition(".")
            self.modules.setdefault(module, {})[last] = (folder / info.file, name)

    def table(self, name: str) -> EmbeddingTable | None:
        """Return the embedding or the output matrix, or None if the checkpoint lacks it."""
        module = name.removesuffix(".weight")
        if module not in self.modules:
            return None
        found = None if self.reader.quantised(self._stored(module)) else stored_table([self.modules[module]["weight"]])
        return found or self._dense(module)

    def _dense(self, module: str) -> EmbeddingTable:
        """Return the dequantised values of an output matrix that is quantised."""
        model = ExportedModel()
        self._layer(model, module)
        return DenseTable(model.weights[f"{module}.weight"])

    def layer(self, names: Sequence[str]) -> ExportedModel:
        """Return the weights of the decoder layer that `names` belong to.

        If `names` belong to no layer, return the weights of the modules outside layers. All weights
        of the layer or modules are returned, also weights that `names` lacks.
        """
        model, layers = ExportedModel(), {name.split(".")[2] for name in names if ".layers." in name}
        for module in self.modules:
            number = module.split(".")[2] if ".layers." in module else None
            if number in layers or (not layers and number is None and f"{module}.weight" not in TABLES):
                self._layer(model, module)
        return model

    def _stored(self, module: str) -> dict[str, Tensor]:
        return {last: _tensor(*place) for last, place in self.modules[module].items()}

    def _layer(self, model: ExportedModel, module: str) -> None:
        stored = self._stored(module)
        quantised = self.reader.quantised(stored)
        if quantised:
            model.put(f"{module}.weight", [self.reader.weight(stored)])
            rounding = self.reader.rounding(stored)
            if rounding is not None:
                model.inputs[module] = rounding
        for name, tensor in stored.items():
            if name not in self.reader.names and not (quantised and name == "weight"):
                model.put(f"{module}.{name}", [QuantizedLinear(tensor).value()])
        for side in ("k", "v"):
            if f"{side}_scale" in stored and module.endswith(f"{side}_proj"):
                # The PyTorch backend stores FP8 keys and values with the scale 1: 1.2 and 1.3 give
                # attention the stored scales of an NVFP4 cache only (`_torch/modules/attention.py`,
                # kv_scales_sf; `_torch/attention_backend/trtllm.py`, kv_cache_scaling_factor).
                model.kv_scales[module] = ("e4m3", torch.ones(()))


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return cast(Tensor, file.get_tensor(name))


def check_format_readable(folder: Path) -> LayerReader:
    """Check that a reader exists for the format of the folder, before any weight is read.

    Raises:
        InputError: The format cannot be read back.
    """
    modelopt = folder / "hf_quant_config.json"
    return reader_of(
        read_json(folder / "config.json"), read_json(modelopt)["quantization"] if modelopt.is_file() else {}
    )


def _renamed(name: str) -> str:
    for old, new in _RENAMES:
        name = name.replace(old, new)
    return name
