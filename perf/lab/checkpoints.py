"""Random checkpoints whose weights need far more memory than the Python interpreter.

`python -m llmops.perf.lab.checkpoints OUTPUT [TOKENIZER]` writes GGUF, or safetensors if a
tokenizer folder is named. The program runs in a separate process, because Linux counts the parent's
memory at a fork into the peak memory of the child, which would disturb the measurement of a build.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llmops.build.checkpoint.known_models import bundled_path

GGUF_HIDDEN, GGUF_INTERMEDIATE, GGUF_LAYERS, GGUF_HEADS, GGUF_KV_HEADS = 2048, 5632, 12, 32, 8
GGUF_FIELDS = {
    "llama.block_count": GGUF_LAYERS,
    "llama.embedding_length": GGUF_HIDDEN,
    "llama.feed_forward_length": GGUF_INTERMEDIATE,
    "llama.attention.head_count": GGUF_HEADS,
    "llama.attention.head_count_kv": GGUF_KV_HEADS,
    "llama.rope.dimension_count": GGUF_HIDDEN // GGUF_HEADS,
}


def make_checkpoint(output: Path, tokenizer: Path | None = None) -> Path:
    """Write a checkpoint to `output` in another process, and return its path."""
    arguments = [str(output), *([str(tokenizer)] if tokenizer else [])]
    subprocess.run([sys.executable, "-m", "llmops.perf.lab.checkpoints", *arguments], check=True)
    return output


def safetensors_checkpoint(folder: Path, tokenizer: Path) -> Path:
    """Write a Llama of random float16 weights (about 1 GiB), and return its folder.

    The tokenizer files are copied from `tokenizer`.
    """
    import torch
    import transformers

    shutil.copytree(tokenizer, folder)
    vocabulary = max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values()) + 1
    sizes = {"vocab_size": vocabulary, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=24, num_key_value_heads=8)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).half()
    model.save_pretrained(folder, max_shard_size="80MB")
    return folder


def gguf_checkpoint(path: Path) -> Path:
    """Write a GGUF file of about 400 MiB, and return its path.

    The model is a wide Llama of random Q4_1 blocks with the vocabulary of the bundled model.
    """
    from gguf import GGUFReader, GGUFWriter

    reader, rng = GGUFReader(bundled_path("smollm2")), np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    _copy_fields(reader, writer)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    _add_matrix(writer, rng, "token_embd", vocabulary, GGUF_HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(GGUF_HIDDEN, np.float32))
    for layer in range(GGUF_LAYERS):
        _add_layer(writer, rng, f"blk.{layer}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_layer(writer: Any, rng: np.random.Generator, block: str) -> None:
    hidden, inner, kv = GGUF_HIDDEN, GGUF_INTERMEDIATE, GGUF_HIDDEN // GGUF_HEADS * GGUF_KV_HEADS
    shapes = {
        "attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    for name, (rows, columns) in shapes.items():
        _add_matrix(writer, rng, f"{block}.{name}", rows, columns)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"{block}.{name}.weight", np.ones(hidden, np.float32))


def _add_matrix(writer: Any, rng: np.random.Generator, name: str, rows: int, columns: int) -> None:
    from gguf import GGMLQuantizationType

    block = np.dtype([("step", "<f2"), ("lowest", "<f2"), ("values", "u1", 16)])
    blocks = np.empty((rows, columns // 32), block)
    blocks["step"], blocks["lowest"] = 0.004, -0.03
    blocks["values"] = np.frombuffer(rng.bytes(blocks.size * 16), np.uint8).reshape(*blocks.shape, 16)
    data = blocks.view(np.uint8).reshape(rows, -1)
    writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType.Q4_1)


def _copy_fields(reader: Any, writer: Any) -> None:
    from gguf import GGUFValueType

    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = GGUF_FIELDS.get(field.name, field.contents())
        kind = field.types[0]
        sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=sub)


if __name__ == "__main__":
    output, *tokenizer = map(Path, sys.argv[1:])
    if tokenizer:
        safetensors_checkpoint(output, tokenizer[0])
    else:
        gguf_checkpoint(output)
