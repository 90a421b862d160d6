"""Describe LoRA adapters, which an engine serves beside its base model, without loading weights.

Format: Hugging Face PEFT (`adapter_config.json`, `adapter_model.safetensors`). The engine's names
of modules are TensorRT-LLM's; their source is NVIDIA/TensorRT-LLM
`examples/hf_lora_convert.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmops.build.checkpoint.description import FileState
from llmops.build.checkpoint.file_checks import read_json, reject_outside_symlinks
from llmops.build.checkpoint.hashing import sha256_of
from llmops.build.checkpoint.safetensors_header import read_header
from llmops.build.engine_folder.manifest_extras import ADAPTER_NAME
from llmops.build.model.architecture import Architecture
from llmops.errors import CheckpointError, InputError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "qkv_proj": "attn_qkv", "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h", "up_proj": "mlp_gate", "gate_up_proj": "mlp_h_to_4h",
}  # fmt: skip
TENSOR = re.compile(r".*\.layers\.(\d{1,6})\.(?:self_attn|mlp)\.([a-z_]+)\.lora_([AB])\.weight")
#: Modules that read the hidden state. The width of the matrix A of such a module shows for which
#: model an adapter was made.
_FROM_HIDDEN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
#: Maximum rank of an adapter, against damaged files. The largest ranks in use are 256.
MAX_RANK = 65_536
_NAME = re.compile(ADAPTER_NAME)
#: Values of `init_lora_weights` at which PEFT also changes the model's own weights (0.21.2
#: tuners/lora/layer.py). PEFT repeats the change when it loads such an adapter; TensorRT-LLM does
#: not. `path_initial_model_for_weight_conversion` saves an adapter that does not need the change.
_CHANGES_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterCheckpoint:
    """A LoRA adapter.

    `name` is the model name under which the adapter is served, and `task_id` its number in requests
    (from 1). `modules` has TensorRT-LLM's names of the adapted modules. `scale` multiplies the
    matrix B. `states` has the state of each file before the checks, by its path in `folder`;
    `reject_changed_files` compares the state.
    """

    name: str
    task_id: int
    folder: Path
    rank: int
    scale: float
    modules: tuple[str, ...]
    states: Mapping[str, FileState | None] = field(default_factory=dict, repr=False)

    @property
    def weights(self) -> Path:
        """Return the path of the file with the adapter's weights."""
        return self.folder / WEIGHTS


def read_adapters(adapters: object, arch: Architecture) -> list[AdapterCheckpoint]:
    """Return the adapters of `--adapter NAME=FOLDER`.

    Args:
        adapters: The folder of each adapter by name, or None for no adapters.
        arch: The base model's architecture.

    Raises:
        InputError, CheckpointError: A name is not allowed, or an adapter cannot be served.
    """
    if adapters is None:
        return []
    if not isinstance(adapters, Mapping):
        raise InputError("An adapter has no name or no folder; write --adapter NAME=FOLDER, once for each.")
    return [_read(str(name), i, Path(str(folder)), arch) for i, (name, folder) in enumerate(adapters.items(), start=1)]


def adapters_digest(adapters: object) -> list[list[str]]:
    """Return the name and the SHA-256 of config and weights of each adapter, for the build key."""
    if not isinstance(adapters, Mapping):
        return []
    return [
        [str(name), *(sha256_of(Path(str(folder)) / file) for file in (CONFIG, WEIGHTS))]
        for name, folder in adapters.items()
    ]


def _read(name: str, task_id: int, folder: Path, arch: Architecture) -> AdapterCheckpoint:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"--adapter {name} is not a model name; use at most 63 letters, digits, dots, dashes and underscores."
        )
    states = reject_outside_symlinks(folder)
    config = _config(folder)
    _reject_unsupported(folder, config)
    rank = config["r"]
    root = rank**0.5 if config.get("use_rslora") else rank
    modules = _modules(folder, arch, rank)
    return AdapterCheckpoint(name, task_id, folder.absolute(), rank, config["lora_alpha"] / root, modules, states)


def _config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is not a LoRA adapter: it has no {name}. Give a folder that PEFT's save_pretrained wrote."
            )
    try:
        config: dict[str, Any] = read_json(folder / CONFIG)
        config["r"], config["lora_alpha"] = int(config["r"]), float(config["lora_alpha"])
        if not (0 < config["r"] <= MAX_RANK and math.isfinite(config["lora_alpha"])):
            raise ValueError(f"its rank is {config['r']:.6g} and its alpha {config['lora_alpha']:g}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{folder / CONFIG} is damaged ({error}); save the adapter again.") from error
    return config


def _reject_unsupported(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an adapter that TensorRT-LLM's LoRA plugin cannot represent."""
    initial = str(config.get("init_lora_weights", True)).lower()
    reasons = {
        "DoRA": config.get("use_dora"),
        "block-diagonal matrices (use_bdlora)": config.get("use_bdlora"),
        "tokens that switch it on (alora_invocation_tokens)": config.get("alora_invocation_tokens"),
        "repeated layers (layer_replication)": config.get("layer_replication"),
        f"a change of the model's own weights (init_lora_weights {initial})": initial.startswith(_CHANGES_MODEL),
        "trained biases": config.get("bias", "none") != "none",
        "whole modules (modules_to_save)": config.get("modules_to_save"),
        "ranks that differ (rank_pattern, alpha_pattern)": config.get("rank_pattern") or config.get("alpha_pattern"),
        # With other ranks, splitkGroupGemm.cu and groupGemm.cu (`ldc_host[i] % kAlignmentC == 0`) end
        # the server at the first step that also has requests of other adapters or of the model.
        f"rank {config['r']}, not 1, 2, 4 or a multiple of 8": config["r"] not in (1, 2, 4) and config["r"] % 8 != 0,
        f"type {config.get('peft_type')}": config.get("peft_type", "LORA") != "LORA",
    }
    for reason, found in reasons.items():
        if found:
            raise CheckpointError(
                f"{folder} is an adapter with {reason}, which is not served; merge it into the model."
            )


def _modules(folder: Path, arch: Architecture, rank: int) -> tuple[str, ...]:
    found: dict[str, None] = {}
    pairs: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for tensor, info in read_header(folder / WEIGHTS, WEIGHTS).items():
        match = TENSOR.fullmatch(tensor)
        if match is None or match[2] not in MODULES:
            known = ", ".join(MODULES)
            raise CheckpointError(
                f"{folder} adapts {tensor}, which cannot be served: adapters may change {known}. Merge it into the "
                "model."
            )
        wrong = match[2] in _FROM_HIDDEN and match[3] == "A" and info.shape[-1:] != (arch.hidden_size,)
        if wrong or int(match[1]) >= arch.num_layers:
            raise CheckpointError(
                f"{folder} is an adapter of another model: {tensor} has shape {list(info.shape)}, and this model has "
                f"{arch.num_layers} layers of {arch.hidden_size}. Give an adapter that was trained for this model."
            )
        found[MODULES[match[2]]] = None
        pairs.setdefault((match[1], match[2]), {})[match[3]] = info.shape
    if not found:
        raise CheckpointError(f"{folder} has no LoRA weights; save the adapter again.")
    # No matrix is wider than two of the model's widest layers, which one matrix may hold together.
    attention = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    widest = 2 * max(arch.hidden_size, attention, arch.intermediate_size)
    for (layer, module), pair in pairs.items():
        a, b = pair.get("A", ()), pair.get("B", ())
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank) or max(a[1], b[0]) > widest:
            raise CheckpointError(
                f"{folder} is damaged: {module} of layer {layer} lacks matrices A and B of rank {rank} that fit this "
                "model; save the adapter again."
            )
    return tuple(found)
