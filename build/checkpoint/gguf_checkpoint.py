"""Open a GGUF file as a `Checkpoint`: its metadata in the keys of a Hugging Face config.json."""

import re
from pathlib import Path
from typing import Any

from llmops.build.checkpoint import gguf_header
from llmops.build.checkpoint.description import Checkpoint, CheckpointFile, ExistingQuantisation, SpecialTokens
from llmops.build.checkpoint.file_checks import file_state
from llmops.build.model.architecture import Architecture
from llmops.errors import CheckpointError

#: GGUF architectures that can be opened: ggml's name -> the Hugging Face class of the same graph.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
_BLOCK_FORMAT = re.compile(r"I?Q(\d)")


def open_gguf(path: Path, ref: str) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        CheckpointError: The file is damaged, holds no weights, or has an architecture outside
            `ARCHITECTURES`.
    """
    states = {path.name: file_state(path)}
    header = gguf_header.read_header(path)
    if not header.tensors:
        raise CheckpointError(f"{path} holds no tensors (a vocabulary-only GGUF); give the file with the weights.")
    config = _config(path, header)
    metadata = header.metadata
    template = metadata.get("tokenizer.chat_template")
    return Checkpoint(
        ref=ref,
        path=path,
        format="gguf",
        config=config,
        architecture=Architecture.from_hf_config(config),
        tensors=header.tensors,
        files=(CheckpointFile(path.name, path, path.stat().st_size),),
        states=states,
        weight_files=(path.name,),
        tokenizer_files=(path.name,) if "tokenizer.ggml.tokens" in metadata else (),
        special_tokens=_special_tokens(metadata),
        name=path.stem.lower(),
        chat_template=template if isinstance(template, str) and template.strip() else None,
        quantisation=_quantisation(header),
        metadata=metadata,
    )


def _config(path: Path, header: gguf_header.GgufHeader) -> dict[str, Any]:
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{path} is a GGUF of architecture {arch!r}, which is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}. Use the Hugging Face checkpoint of this model instead."
        )
    if metadata.get(f"{arch}.expert_count"):
        raise CheckpointError(
            f"{path} is a mixture-of-experts GGUF, which is not supported; use the Hugging Face checkpoint of this "
            "model instead."
        )
    config = {name: metadata[f"{arch}.{key}"] for name, key in _FIELDS.items() if f"{arch}.{key}" in metadata}
    config["architectures"] = [ARCHITECTURES[arch]]
    config["model_type"] = arch
    config["vocab_size"] = _vocab_size(header)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["rope_scaling"] = _rope_scaling(path, metadata, arch)
    return {key: value for key, value in config.items() if value is not None}


def _vocab_size(header: gguf_header.GgufHeader) -> int | None:
    embedding = header.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else None


def _rope_scaling(path: Path, metadata: dict[str, Any], arch: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{arch}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.get(f"{arch}.rope.scaling.factor", 1.0)}
    raise CheckpointError(
        f"{path} scales RoPE by {kind!r}, and only GGUF files with linear or no scaling can be built; use "
        f"the Hugging Face checkpoint of this model instead."
    )


def _special_tokens(metadata: dict[str, Any]) -> SpecialTokens:
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    end = tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"]) if i is not None))
    pad = ids["padding"] if ids["padding"] is not None else (end[0] if end else None)
    return SpecialTokens(bos=ids["bos"], end=end, pad=pad)


def _quantisation(header: gguf_header.GgufHeader) -> ExistingQuantisation | None:
    """Return the GGML block format of most weights, or None if most weights are plain floats."""
    by_dtype: dict[str, int] = {}
    for tensor in header.tensors.values():
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.numel
    main = max(by_dtype, key=lambda dtype: by_dtype[dtype])
    bits = block_bits(main)
    return ExistingQuantisation("gguf", bits, {"dtype": main, "elements": by_dtype}) if bits else None


def block_bits(dtype: str) -> int | None:
    """Return the bits per weight of a GGML block format, or None for F32, F16 and BF16.

    Q4_1, for example, has 4 bits.
    """
    match = _BLOCK_FORMAT.match(dtype)
    return int(match.group(1)) if match else None
