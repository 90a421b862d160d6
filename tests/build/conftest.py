"""Small random checkpoints of the real formats, made once per run."""

import json
import os
from pathlib import Path

import pytest

from tests.support.tokenizer_files import byte_level_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 1,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-scaled": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "phi3": ("Phi3Config", {}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 4}),
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with a bos, an eos and a chat template."""
    text = "the cat sat on the mat and the dog ran after it"
    byte_level_tokenizer([text] * 8, 300, ["<s>", "</s>"]).save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_checkpoint(folder: Path, variant: str = "llama", dtype: str = "float32") -> Path:
    import torch
    import transformers

    kind, changes = VARIANTS[variant]
    config = getattr(transformers, kind)(**{**SIZES, "tie_word_embeddings": False, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        # Norms and biases start as ones and zeros, which would hide that they are applied at all.
        parameter.data = torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers; read-only."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture
def copy_of_tiny(tiny: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    import shutil

    return Path(shutil.copytree(tiny, tmp_path / "tiny-llama"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remembered hashes of one test must not reach another."""
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from llmops.build.checkpoint.known_models import bundled_path
    from llmops.errors import MissingDependencyError

    try:
        return bundled_path("smollm2")
    except MissingDependencyError as error:
        pytest.skip(str(error))
