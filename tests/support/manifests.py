"""engine.json of engines that have no weights."""

from typing import Any

from llmops.build.engine_folder.manifest import EngineManifest


def engine_manifest(target: str, **fields: Any) -> EngineManifest:
    """Return engine.json of a small Llama as far as a repository reads it, with other `fields`."""
    return EngineManifest.model_validate(
        {
            "key": "k", "name": "tiny", "target": target, "architecture": "LlamaForCausalLM", "versions": {},
            "source": {"checkpoint": "x", "format": "huggingface", "files": []},
            "limits": {"max_batch_size": 8, "max_seq_len": 512, "max_num_tokens": 256},
            "tokenizer": {"vocab_size": 512, "bos_id": 1, "end_ids": [2], "pad_id": None, "chat_template": True},
            **fields,
        }
    )  # fmt: skip
