"""Read rank0…rankN.safetensors of a TensorRT-LLM checkpoint back and join the ranks."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from llmops.build.quant_formats import format_of_algorithm
from llmops.build.quantize.embedding_tables import EMBEDDING, HEAD, EmbeddingTable, stored_table
from llmops.build.quantize.exported_weights import ExportedModel, InputRounding, QuantizedLinear
from llmops.errors import BuildError

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
}
_TABLES = {EMBEDDING: "transformer.vocab_embedding.weight", HEAD: "lm_head.weight"}
_EXPERTS = {"mixtral": ("w1", "w3", "w2")}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class RankFileReader:
    """A reader of the TensorRT-LLM checkpoint in `folder`. Tensors are read when requested.

    Raises:
        BuildError: A rank file is missing.
    """

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.family = folder, family
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.quant_format = format_of_algorithm(str(self.config["quantization"].get("quant_algo") or ""))
        mapping = self.config["mapping"]
        self.tp, self.pp = int(mapping["tp_size"]), int(mapping["pp_size"])
        missing = [r for r in range(self.tp * self.pp) if not (folder / f"rank{r}.safetensors").is_file()]
        if missing:
            raise BuildError(f"{folder} lacks rank{missing[0]}.safetensors; quantise again.")
        self.files: list[Any] = [safe_open(folder / f"rank{r}.safetensors", "pt") for r in range(self.tp * self.pp)]
        # Gemma's norms multiply by 1 + weight, and TensorRT-LLM stores the sum.
        self.norm_offset = 1.0 if family.startswith("gemma") else 0.0
        self.names = [set(file.keys()) for file in self.files]

    def table(self, name: str) -> EmbeddingTable | None:
        """Return the embedding or output matrix, or None if the model has no separate matrix.

        Each rank has a part of the rows.
        """
        stage, stored = (0, _TABLES[name]) if name == EMBEDDING else (self.pp - 1, _TABLES[name])
        parts = [(self.folder / f"rank{r}.safetensors", stored) for r in self._ranks(stage) if stored in self.names[r]]
        return stored_table(parts, self._vocab())

    def layer(self, names: Sequence[str]) -> ExportedModel:
        """Return the weights of the decoder layer that `names` belong to.

        If `names` belong to no layer, return the weights of the modules outside layers.
        """
        model, numbers = ExportedModel(), {int(name.split(".")[2]) for name in names if ".layers." in name}
        for number in numbers:
            self._layer(model, number)
        if not numbers:
            self._norm(model)
        return model

    def _norm(self, model: ExportedModel) -> None:
        norm = self._joined(self.pp - 1, "transformer.ln_f.weight", None)
        assert norm is not None
        self._plain(model, "model.norm.weight", norm - self.norm_offset)

    def _vocab(self) -> int:
        return int(self.config["vocab_size"])

    def _plain(self, model: ExportedModel, name: str, tensor: Tensor) -> None:
        model.put(name, [QuantizedLinear(tensor).value()])

    def _ranks(self, stage: int) -> range:
        return range(stage * self.tp, (stage + 1) * self.tp)

    def _parts(self, stage: int, name: str) -> list[Tensor]:
        return [self.files[r].get_tensor(name) for r in self._ranks(stage) if name in self.names[r]]

    def _joined(self, stage: int, name: str, dim: int | None) -> Tensor | None:
        parts = self._parts(stage, name)
        if not parts:
            return None
        return parts[0] if dim is None else torch.cat([part.float() for part in parts], dim=dim).to(parts[0].dtype)

    def _layer(self, model: ExportedModel, layer: int) -> None:
        per_stage = self.config["num_hidden_layers"] // self.pp
        stage, local = divmod(layer, per_stage)
        source, target = f"transformer.layers.{local}", f"model.layers.{layer}"
        for engine_name, hf_name in _NORMS.items():
            tensor = self._joined(stage, f"{source}.{engine_name}.weight", None)
            if tensor is not None:
                self._plain(model, f"{target}.{hf_name}.weight", tensor - self.norm_offset)
        self._attention(model, stage, f"{source}.attention", f"{target}.self_attn")
        if "moe" in self.config:
            self._experts(model, stage, f"{source}.mlp", f"{target}.mlp")
        else:
            self._mlp(model, stage, f"{source}.mlp", f"{target}.mlp")

    def _linears(self, stage: int, name: str) -> list[QuantizedLinear]:
        """Return the parts of the linear layer `name`, one for each rank of a pipeline stage."""
        later = self.quant_format.bits if self.quant_format and self.quant_format.quantized_by_builder else None
        stored = self._stored(stage, name)
        return [QuantizedLinear(*tensors, later_bits=later if tensors[1] is None else None) for tensors in stored]

    def _stored(self, stage: int, name: str) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        for rank in self._ranks(stage):
            scale = self._optional(rank, f"{name}.weights_scaling_factor")
            if scale is None:
                scale = self._optional(rank, f"{name}.per_channel_scale")
            prequant = self._optional(rank, f"{name}.prequant_scaling_factor")
            yield self.files[rank].get_tensor(f"{name}.weight"), scale, prequant

    def _optional(self, rank: int, name: str) -> Tensor | None:
        return self.files[rank].get_tensor(name) if name in self.names[rank] else None

    def _put(self, model: ExportedModel, name: str, shares: list[QuantizedLinear], dim: int) -> None:
        model.put(f"{name}.weight", [share.value() for share in shares], dim)

    def _input(self, model: ExportedModel, stage: int, source: str, targets: list[str], dim: int | None) -> None:
        kind = self.quant_format.inputs if self.quant_format else None
        if kind is None:
            return
        scales = self._parts(stage, f"{source}.activation_scaling_factor")
        prequant = self._joined(stage, f"{source}.prequant_scaling_factor", dim)
        for target in targets:
            scale = scales[0].float().max() if scales else None
            # The hook applies one factor for all experts. If each expert has its own factor, the
            # effective weights contain the factors.
            shared = prequant if prequant is None or prequant.dim() == 1 else None
            model.inputs[target] = InputRounding(kind, scale, shared)

    def _attention(self, model: ExportedModel, stage: int, source: str, target: str) -> None:
        names = ("q_proj", "k_proj", "v_proj")
        parts = [stored.value().split(self._qkv_rows(), dim=-2) for stored in self._linears(stage, f"{source}.qkv")]
        replicas = max(1, self.tp // self.config["num_key_value_heads"])
        query, key, value = ([part[i] for part in parts] for i in range(3))
        joined = [query, key[::replicas], value[::replicas]]
        if self.family == "phi3":
            model.put(f"{target}.qkv_proj.weight", [share for group in joined for share in group])
            self._input(model, stage, f"{source}.qkv", [f"{target}.qkv_proj"], None)
        else:
            for name, shards in zip(names, joined, strict=True):
                model.put(f"{target}.{name}.weight", shards)
            self._input(model, stage, f"{source}.qkv", [f"{target}.{name}" for name in names], None)
        self._bias(model, stage, source, target, replicas)
        self._put(model, f"{target}.o_proj", self._linears(stage, f"{source}.dense"), 1)
        self._input(model, stage, f"{source}.dense", [f"{target}.o_proj"], 0)
        kv = self._parts(stage, f"{source}.kv_cache_scaling_factor")
        algorithm = self.config["quantization"].get("kv_cache_quant_algo")
        # phi3 has one matrix for queries, keys and values, and only a part of its output would be
        # rounded.
        if kv and algorithm and self.family != "phi3":
            rounding = ("e4m3" if algorithm == "FP8" else "int8", kv[0].float().max())
            model.kv_scales.update({f"{target}.k_proj": rounding, f"{target}.v_proj": rounding})

    def _qkv_rows(self) -> tuple[int, int, int]:
        head = int(self.config["head_size"])
        query = self.config["num_attention_heads"] // self.tp * head
        key = max(1, self.config["num_key_value_heads"] // self.tp) * head
        return query, key, key

    def _bias(self, model: ExportedModel, stage: int, source: str, target: str, replicas: int) -> None:
        biases = self._parts(stage, f"{source}.qkv.bias")
        for index, name in enumerate(("q_proj", "k_proj", "v_proj") if biases else ()):
            shards = [bias.split(self._qkv_rows())[index] for bias in biases][:: replicas if index else 1]
            self._plain(model, f"{target}.{name}.bias", torch.cat(shards))

    def _mlp(self, model: ExportedModel, stage: int, source: str, target: str) -> None:
        fc = self._linears(stage, f"{source}.fc")
        if self.family == "phi3":
            half = self.config["intermediate_size"] // self.tp
            parts = [stored.value().split((half, half), dim=-2) for stored in fc]
            model.put(f"{target}.gate_up_proj.weight", [p[1] for p in parts] + [p[0] for p in parts])
            self._input(model, stage, f"{source}.fc", [f"{target}.gate_up_proj"], None)
        else:
            self._put(model, f"{target}.gate_proj", fc, 0)
            self._put(model, f"{target}.up_proj", self._linears(stage, f"{source}.gate"), 0)
            self._input(model, stage, f"{source}.fc", [f"{target}.gate_proj"], None)
            self._input(model, stage, f"{source}.gate", [f"{target}.up_proj"], None)
        self._put(model, f"{target}.down_proj", self._linears(stage, f"{source}.proj"), 1)
        self._input(model, stage, f"{source}.proj", [f"{target}.down_proj"], 0)

    def _experts(self, model: ExportedModel, stage: int, source: str, target: str) -> None:
        router = self._joined(stage, f"{source}.router.weight", None)
        assert router is not None
        self._plain(model, f"{target}.gate.weight", router)
        gate, up, down = _EXPERTS.get(self.family, _PROJECTIONS)
        fc = self._linears(stage, f"{source}.fc")
        proj = [stored.value() for stored in self._linears(stage, f"{source}.proj")]
        half = self.config["moe_intermediate_size"] // self.tp
        halves = [stored.value().split((half, half), dim=-2) for stored in fc]
        for expert in range(self.config["moe"]["num_experts"]):
            name = f"{target}.experts.{expert}"
            model.put(f"{name}.{up}.weight", [h[0][expert] for h in halves])
            model.put(f"{name}.{gate}.weight", [h[1][expert] for h in halves])
            model.put(f"{name}.{down}.weight", [p[expert] for p in proj], 1)
            self._input(model, stage, f"{source}.fc", [f"{name}.{gate}", f"{name}.{up}"], None)
            self._input(model, stage, f"{source}.proj", [f"{name}.{down}"], 0)
