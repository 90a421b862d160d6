"""Facts about the build targets, for packages that must not import the targets.

The code of a target is in `llmops.build.targets.NAME` and `llmops.model_repository.targets.NAME`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

TargetName = Literal["openvino", "tensorrt", "pytorch"]


@dataclass(frozen=True)
class TargetFacts:
    """The facts of one target.

    `library` is the Python package that runs the target's engines, and must be installed on the
    serving machine. `gpus` is True if the engines run on GPUs. `kv_caches` are the values of
    --kv-cache. `quant` is the format that `llmops up` builds.
    """

    library: str
    gpus: bool
    kv_caches: tuple[str, ...]
    quant: str


TARGETS: dict[TargetName, TargetFacts] = {
    "openvino": TargetFacts("openvino", False, ("auto", "f32", "f16", "u8"), "int8"),
    "tensorrt": TargetFacts("tensorrt_llm", True, ("auto", "fp8", "int8"), "fp8"),
    "pytorch": TargetFacts("tensorrt_llm", True, ("auto", "fp8"), "fp8"),
}
NAMES: tuple[str, ...] = get_args(TargetName)
if set(NAMES) != set(TARGETS):
    raise ImportError(f"TargetName and TARGETS differ in {', '.join(sorted(set(NAMES) ^ set(TARGETS)))}.")
GPU_TARGETS = tuple(name for name, facts in TARGETS.items() if facts.gpus)
