"""What engine.json says of an engine beyond what all have: `extra`, one model per target.

A field that an engine.json leaves out has the value that its readers always took it for; one that none of the models
has is refused. Only what was given is written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from llmops.build.target_facts import TargetName


class ManifestExtra(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenVinoRuntime(ManifestExtra):
    """Properties that the engine model hands to the pipeline, the sizes of its KV cache, and who made the graph.

    `prefix_cache`: True keeps the prefix cache although tenants share it, False is without one. By default it is
    given up with the first request of a tenant. `step_seconds` is the mean step that chunks of long prompts keep;
    None: chunks have `max_num_tokens`.
    """

    device: str = "CPU"
    properties: dict[str, str] = Field(default_factory=dict)
    kv_cache: dict[str, int] = Field(default_factory=dict)
    graph: str = ""
    grammars: dict[str, Any] = Field(default_factory=dict)
    prefix_cache: bool | None = None
    step_seconds: Annotated[float, Field(gt=0)] | None = 0.1


class OpenVinoExtra(ManifestExtra):
    openvino: OpenVinoRuntime = Field(default_factory=OpenVinoRuntime)


class EmbeddingInfo(ManifestExtra):
    """`pooling` is mean or cls."""

    dimensions: int
    pooling: str
    normalised: bool


class EncoderExtra(ManifestExtra):
    embedding: EmbeddingInfo


class ScoreInfo(ManifestExtra):
    """`activation` makes the score of the head's output; `token_types` are those of the inputs."""

    activation: str
    token_types: int = 1


class CrossEncoderExtra(ManifestExtra):
    score: ScoreInfo


class AdapterEntry(ManifestExtra):
    """A LoRA adapter: the model name that it is served under, and its number in requests."""

    name: str
    id: int


class NvidiaExtra(ManifestExtra):
    """`tensorrt_llm` is the version that the engine was made for, `image` one that has it; `quality_limits` are those
    that the user set."""

    tensorrt_llm: str
    image: str = ""
    calibration_tokens: int = 0
    quality_limits: dict[str, Any] = Field(default_factory=dict)
    adapters: list[AdapterEntry] = Field(default_factory=list)


class TensorrtExtra(NvidiaExtra):
    """`trtllm_build` is the command that makes the engine; `speculative` are window, n-gram and verification set of
    lookahead decoding, `serve` parameters of the C++ backend, `lora_bytes` the size of all adapters."""

    trtllm_build: list[str] = Field(default_factory=list)
    max_input_len: int | None = None
    speculative: list[int] | None = None
    guided: bool = False
    serve: dict[str, Any] = Field(default_factory=dict)
    lora_bytes: int = 0


class PytorchExtra(NvidiaExtra):
    """`llm_args` are the arguments of `tensorrt_llm.LLM`, in names that no release owns."""

    llm_args: dict[str, Any]


# a target that is not here has nothing beyond what all have
_EXTRAS: dict[TargetName, type[ManifestExtra]] = {
    "openvino": OpenVinoExtra,
    "tensorrt": TensorrtExtra,
    "pytorch": PytorchExtra,
}


def extra_type(target: TargetName, given: Mapping[str, Any]) -> type[ManifestExtra]:
    """Encoders are engines of target openvino with another pipeline."""
    if target == "openvino" and ("embedding" in given or "score" in given):
        return CrossEncoderExtra if "score" in given else EncoderExtra
    return _EXTRAS.get(target, ManifestExtra)
