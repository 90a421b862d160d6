"""Tiny random models of every family, written as Hugging Face folders with a tokenizer."""

import json
from pathlib import Path
from typing import Any

from tests.support.tokenizer_files import byte_level_tokenizer

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
_DELTA_NET = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_value_head_dim": 32, "linear_key_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_ROUTED = {
    "moe_intermediate_size": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
_DEEPSEEK = {
    **_ROUTED, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}> "
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"bos_token_id": 1, "eos_token_id": 2}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 256, "norm_topk_prob": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 128}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 128}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV3Config", {
        **_DEEPSEEK, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64,
        "architectures": ["DeepseekV32ForCausalLM"]}),
    "glm4_moe": ("Glm4MoeConfig", {"head_dim": 32, **_ROUTED}),
    "minimax_m2": ("MiniMaxM2Config", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("Llama4TextConfig", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1,
                                    "intermediate_size_mlp": 512, "interleave_moe_layer_step": 1}),
    "qwen3_5": ("Qwen3_5TextConfig", {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "attn_output_gate": True, **_DELTA_NET}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "attn_output_gate": True,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256, **_DELTA_NET}),
    "nemotron_h": ("NemotronHConfig", {
        "head_dim": 32, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 4, "ssm_state_size": 16, "conv_kernel": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip


# quantization_config of checkpoints as others publish them
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# families that are only passed on, as they are published; None where that is in full precision
PUBLISHED = {
    "deepseek_v3": FP8, "deepseek_v32": FP8, "glm4_moe": None, "minimax_m2": FP8, "llama4": None,
    "qwen3_5": None, "qwen3_5_moe": None, "nemotron_h": None,
    "gpt_oss": {"quant_method": "mxfp4"},
}  # fmt: skip


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with all linear layers alike."""
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def write_config(folder: Path, family: str) -> Path:
    """Write the config.json of a checkpoint of `family`, of a published one with its quantisation."""
    import transformers

    name, extra = CLASSES[family]
    config = getattr(transformers, name)(**{**SIZES, **extra})
    plain = [name.replace("TextConfig", "ForCausalLM").replace("Config", "ForCausalLM")]
    config.architectures = extra.get("architectures", plain)
    config.save_pretrained(folder)
    if quantised := PUBLISHED.get(family):
        edit_config(folder, quantization_config=quantised)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def export_quantised(
    source: Any, folder: Path, form: Any, target: str, *, tp: int = 1, pp: int = 1, kv: str = "auto",
    group: int | None = None, dtype: str | None = None, size: int = 2, seq_len: int = 48,
) -> dict[str, Any]:  # fmt: skip
    """Quantise a tiny checkpoint and export it into a folder. Return the weights that it had."""
    from llmops.build.progress import SilentProgress
    from llmops.build.quantize.calibration import CalibrationSettings
    from llmops.build.quantize.checkpoint_export import export_engine_checkpoint, export_hf_checkpoint
    from llmops.build.quantize.model_loading import load_model, load_tokenizer
    from llmops.build.quantize.module_fixes import split_experts
    from llmops.build.quantize.quantizer import quantize

    model = load_model(source)
    split_experts(model)
    weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    settings = CalibrationSettings(size=size, seq_len=seq_len)
    quantize(model, load_tokenizer(source), form, kv, group, settings, SilentProgress())
    if target == "tensorrt":
        export_engine_checkpoint(model, source.architecture, form, folder, tp, pp, dtype)
    else:
        export_hf_checkpoint(model, source.architecture, form, folder, dtype)
    return weights


def write_checkpoint(folder: Path, family: str, seed: int = 0, fitted: bool = False, **overrides: Any) -> Path:
    """A checkpoint of `family` in `folder`: float32, random weights but for an output matrix that is `fitted`."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    name, extra = CLASSES[family]
    config = getattr(transformers, name)(**{**SIZES, **extra, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_tokenizer(folder)
    if fitted:
        fit_output(model, folder)
    model.save_pretrained(folder)
    return folder


def fit_output(model: Any, folder: Path) -> None:
    """Fit the output matrix to the calibration texts over the states of the random layers: a model that expects some
    bytes and not others, for the price of one forward pass."""
    import torch
    from tokenizers import Tokenizer

    from llmops.build.quantize.calibration import bundled_texts

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("\n".join(bundled_texts())).ids
    data = torch.tensor(ids[: 64 * 64]).view(-1, 64)
    with torch.no_grad():
        states = model.model(data).last_hidden_state[:, :-1].flatten(0, 1)
    targets, output = data[:, 1:].flatten(), model.lm_head.weight
    optimizer = torch.optim.Adam([output], lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(states @ output.T, targets).backward()
        optimizer.step()


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, after three special ones: any text can be encoded."""
    special = ["<pad>", "<s>", "</s>"]
    byte_level_tokenizer((), 256 + len(special), special).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
