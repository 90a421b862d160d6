"""Published models' shapes, from their config.json as llmops knows it."""

from typing import Any

from llmops.build.checkpoint.known_models import known_model
from llmops.build.model.architecture import Architecture


def config_of(hub_id: str, **fields: Any) -> dict[str, Any]:
    """Return a model's config.json, with other `fields`."""
    known = known_model(hub_id)
    assert known is not None
    return {**known.config, **fields}


def shapes_of(hub_id: str, **fields: Any) -> Architecture:
    return Architecture.from_hf_config(config_of(hub_id, **fields))


LLAMA2_7B = shapes_of("meta-llama/Llama-2-7b-hf")
LLAMA31_8B = shapes_of("meta-llama/Llama-3.1-8B")
LLAMA31_70B_CONFIG = config_of("meta-llama/Llama-3.1-70B")
LLAMA31_70B = Architecture.from_hf_config(LLAMA31_70B_CONFIG)
LLAMA31_405B = shapes_of("meta-llama/Llama-3.1-405B")
MISTRAL_7B = shapes_of("mistralai/Mistral-7B-v0.1")
MIXTRAL_8X7B = shapes_of("mistralai/Mixtral-8x7B-v0.1")
# the first version, whose vocabulary was smaller
MIXTRAL_8X22B = shapes_of("mistralai/Mixtral-8x22B-v0.1", vocab_size=32000)
QWEN25_7B = shapes_of("Qwen/Qwen2.5-7B")
QWEN3_30B = shapes_of("Qwen/Qwen3-30B-A3B")
GEMMA2_9B = shapes_of("google/gemma-2-9b-it")
PHI4 = shapes_of("microsoft/phi-4")
DEEPSEEK_V3 = shapes_of("deepseek-ai/DeepSeek-V3")
GPT_OSS_20B = shapes_of("openai/gpt-oss-20b")
