"""How much memory the quality gate takes for a model that it could not hold: a random Llama against itself, on the CPU.

    python -m llmops.perf.lab.benchmarks.gate_memory [--billion 1.5]

Anonymous memory of the process, without the pages of mapped files, which the kernel takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
_LAYER = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048


def write_llama(folder: Path, layers: int) -> int:
    """A bfloat16 checkpoint with the bundled model's tokenizer, one file per layer. Returns its parameters."""
    import torch
    from safetensors.torch import save_file

    from llmops.build.checkpoint import open_checkpoint
    from llmops.build.tokenizer import write_tokenizer

    write_tokenizer(open_checkpoint("smollm2"), folder, lambda sentence: None)
    generator, count = torch.Generator().manual_seed(0), 0

    def random(*shape: int) -> Any:
        nonlocal count
        count += shape[0] * (shape[1] if len(shape) > 1 else 1)
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    hidden, inner, key = 2048, 8192, 512
    outer = {"model.embed_tokens": (49152, hidden), "lm_head": (49152, hidden), "model.norm": (hidden,)}
    save_file({f"{name}.weight": random(*shape) for name, shape in outer.items()}, folder / "outer.safetensors")
    for number in range(layers):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key, hidden), "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        tensors = {f"model.layers.{number}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        save_file(tensors, folder / f"layer-{number}.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "num_hidden_layers": layers,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, **SHAPE,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return count


def anonymous() -> int:
    """Bytes of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def gate(folder: str) -> None:
    """In a process of its own: prints what it holds with all libraries loaded, and its peak."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from llmops.build.progress import SilentProgress
    from llmops.build.quality import evaluate, export_comparison, source_model  # noqa: F401

    base = peak = anonymous()

    def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, anonymous())
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    begin = time.monotonic()
    quality, _ = evaluate.evaluate(Path(folder), folder, {}, SilentProgress())
    print(json.dumps({"base": base, "peak": peak, "seconds": time.monotonic() - begin, "kl": quality.mean_kl}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--billion", type=float, default=1.5, help="Parameters of the model.")
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.gate:
        gate(given.gate)
        return
    with tempfile.TemporaryDirectory(prefix="llmops-gate-") as scratch:
        folder = Path(scratch) / "model"
        count = write_llama(folder, max(round((given.billion * 1e9 - 2 * 49152 * 2048) / _LAYER), 1))
        command = [sys.executable, "-m", "llmops.perf.lab.benchmarks.gate_memory", "--gate", str(folder)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    over = (found["peak"] - found["base"]) / 1e9
    print(
        f"{count / 1e9:.2f} B parameters, {count * 4 / 1e9:.1f} GB in float32; base {found['base'] / 1e9:.2f} GB, "
        f"peak {over:.2f} GB over it, {found['seconds']:.0f} s, mean KL {found['kl']:.1e}"
    )


if __name__ == "__main__":
    main()
