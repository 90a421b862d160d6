"""Target-specific fields of engine.json: one pydantic model of `extra` per target.

Unknown fields are rejected. A field that engine.json leaves out has its default. Only fields that
were set are written again.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmops.build.target_facts import TargetName

#: Pattern of an adapter's name, which is also the name of its folder in the engine.
ADAPTER_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


class ManifestExtra(BaseModel):
    """The base class of all models of `extra`: frozen, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


#: The OpenVINO properties that engine.json may set. Other properties make OpenVINO write files
#: (CACHE_DIR) or start threads.
OpenVinoProperty = Literal["KV_CACHE_PRECISION", "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]


class OpenVinoRuntime(ManifestExtra):
    """Settings of the OpenVINO pipeline, the sizes of its KV cache, and the origin of the graph.

    `prefix_cache` True keeps the prefix cache although tenants share it, and False turns the cache
    off. With None, the engine turns the cache off at the first request of a tenant. `step_seconds`
    is the mean duration in seconds of an engine step, for which chunks of long prompts are sized.
    With None, chunks have `max_num_tokens` tokens.
    """

    device: Literal["CPU"] = "CPU"
    properties: dict[OpenVinoProperty, str] = Field(default_factory=dict)
    kv_cache: dict[str, int] = Field(default_factory=dict)
    graph: str = ""
    grammars: dict[str, Any] = Field(default_factory=dict)
    prefix_cache: bool | None = None
    step_seconds: Annotated[float, Field(gt=0)] | None = 0.1


class OpenVinoExtra(ManifestExtra):
    """The model of `extra` for target openvino."""

    openvino: OpenVinoRuntime = Field(default_factory=OpenVinoRuntime)


class EmbeddingInfo(ManifestExtra):
    """The vectors of an embedding model. `pooling` is mean or cls, `normalised` means length 1."""

    dimensions: int
    pooling: str
    normalised: bool


class EncoderExtra(ManifestExtra):
    """The model of `extra` for an embedding model."""

    embedding: EmbeddingInfo


class ScoreInfo(ManifestExtra):
    """The score of a cross-encoder.

    `activation` names the function that maps the head's output to the score. `token_types` is the
    number of input segments that the model tells apart.
    """

    activation: str
    token_types: int = 1


class CrossEncoderExtra(ManifestExtra):
    """The model of `extra` for a reranking model."""

    score: ScoreInfo


class AdapterEntry(ManifestExtra):
    """A LoRA adapter: the model name under which it is served, and its number in requests."""

    name: Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")]
    id: Annotated[int, Field(ge=1, lt=2**31)]


class NvidiaExtra(ManifestExtra):
    """The fields of `extra` that both NVIDIA targets share.

    `tensorrt_llm` is the version for which the engine was built, and `image` a container image with
    this version. `calibration_tokens` is the number of tokens that calibrated the quantisation.
    `quality_limits` are the limits that the user set, by name.
    """

    tensorrt_llm: str
    image: str = ""
    calibration_tokens: int = 0
    quality_limits: dict[str, Any] = Field(default_factory=dict)
    adapters: list[AdapterEntry] = Field(default_factory=list)


class TensorrtExtra(NvidiaExtra):
    """The model of `extra` for target tensorrt.

    `trtllm_build` is the command that builds the engine. `max_input_len` is in tokens.
    `speculative` holds the sizes of window, n-gram and verification set of lookahead decoding.
    `guided` is True if the engine can enforce grammars. `serve` holds parameters of the C++
    backend, and `lora_bytes` the size of all adapters.
    """

    trtllm_build: list[str] = Field(default_factory=list)
    max_input_len: int | None = None
    speculative: list[int] | None = None
    guided: bool = False
    serve: dict[str, Any] = Field(default_factory=dict)
    lora_bytes: int = 0


class PytorchExtra(NvidiaExtra):
    """The model of `extra` for target pytorch.

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

    Encoders have target openvino, and models of their own.
    """
    if target == "openvino" and ("embedding" in fields or "score" in fields):
        return CrossEncoderExtra if "score" in fields else EncoderExtra
    return _EXTRAS.get(target, ManifestExtra)
