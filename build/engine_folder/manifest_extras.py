"""Target-specific fields of engine.json: one model of `extra` per target.

Unknown fields are rejected. A field that engine.json leaves out has the value that its readers
always assumed. Only fields that were set are written again.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmops.build.target_facts import TargetName


class ManifestExtra(BaseModel):
    """The base of all extras: frozen, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


#: The properties that a build sets. Others make OpenVINO write files (CACHE_DIR) and start threads.
OpenVinoProperty = Literal["KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]


class OpenVinoRuntime(ManifestExtra):
    """Settings of the OpenVINO pipeline, the sizes of its KV cache, and the origin of the graph.

    `prefix_cache` True keeps the prefix cache although tenants share it, False disables it; by
    default the engine gives it up at the first request of a tenant. `step_seconds` is the mean
    duration of an engine step that chunks of long prompts keep; None means that chunks have
    `max_num_tokens`.
    """

    device: Literal["CPU"] = "CPU"
    properties: dict[OpenVinoProperty, str] = Field(default_factory=dict)
    kv_cache: dict[str, int] = Field(default_factory=dict)
    graph: str = ""
    grammars: dict[str, Any] = Field(default_factory=dict)
    prefix_cache: bool | None = None
    step_seconds: Annotated[float, Field(gt=0)] | None = 0.1


class OpenVinoExtra(ManifestExtra):
    """The extra of target openvino."""

    openvino: OpenVinoRuntime = Field(default_factory=OpenVinoRuntime)


class EmbeddingInfo(ManifestExtra):
    """The vectors of an embedding model. `pooling` is mean or cls."""

    dimensions: int
    pooling: str
    normalised: bool


class EncoderExtra(ManifestExtra):
    """The extra of an embedding model."""

    embedding: EmbeddingInfo


class ScoreInfo(ManifestExtra):
    """The score of a cross-encoder.

    `activation` maps the head's output to the score, `token_types` counts the input segments.
    """

    activation: str
    token_types: int = 1


class CrossEncoderExtra(ManifestExtra):
    """The extra of a reranking model."""

    score: ScoreInfo


class AdapterEntry(ManifestExtra):
    """A LoRA adapter: the model name under which it is served, and its number in requests."""

    name: str
    id: int


class NvidiaExtra(ManifestExtra):
    """The fields that both NVIDIA targets share.

    `tensorrt_llm` is the version the engine was made for, `image` an image that has it,
    `quality_limits` the limits that the user set.
    """

    tensorrt_llm: str
    image: str = ""
    calibration_tokens: int = 0
    quality_limits: dict[str, Any] = Field(default_factory=dict)
    adapters: list[AdapterEntry] = Field(default_factory=list)


class TensorrtExtra(NvidiaExtra):
    """The extra of target tensorrt.

    `trtllm_build` is the command that makes the engine. `speculative` holds window, n-gram and
    verification set of lookahead decoding, `serve` parameters of the C++ backend, `lora_bytes` the
    size of all adapters.
    """

    trtllm_build: list[str] = Field(default_factory=list)
    max_input_len: int | None = None
    speculative: list[int] | None = None
    guided: bool = False
    serve: dict[str, Any] = Field(default_factory=dict)
    lora_bytes: int = 0


class PytorchExtra(NvidiaExtra):
    """The extra of target pytorch.

    `llm_args` are the arguments of `tensorrt_llm.LLM`, under names that do not depend on the
    TensorRT-LLM release.
    """

    llm_args: dict[str, Any]


_EXTRAS: dict[TargetName, type[ManifestExtra]] = {
    "openvino": OpenVinoExtra,
    "tensorrt": TensorrtExtra,
    "pytorch": PytorchExtra,
}


def extra_type(target: TargetName, fields: Mapping[str, Any]) -> type[ManifestExtra]:
    """Return the model of `extra` for a target.

    Encoders are engines of target openvino with another pipeline.
    """
    if target == "openvino" and ("embedding" in fields or "score" in fields):
        return CrossEncoderExtra if "score" in fields else EncoderExtra
    return _EXTRAS.get(target, ManifestExtra)
