"""Image tag -> Triton -> TensorRT-LLM -> which targets it can build and serve.

Source: triton-inference-server/server `docs/introduction/compatibility.md`; TensorRT engines end with 1.3.0rc20
(NVIDIA/TensorRT-LLM release notes), and 26.07 is the last Triton image with TensorRT-LLM. From 1.3 on the image is our
own: NVIDIA's release image of TensorRT-LLM with the tritonserver of the nvidia-pytriton wheel (Dockerfile.trtllm).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmops.errors import VersionMismatchError

REGISTRY = "nvcr.io/nvidia/tritonserver"
RELEASES = "nvcr.io/nvidia/tensorrt-llm/release"
DEFAULT_TAG = "26.07"


@dataclass(frozen=True)
class Image:
    """One `tritonserver:<tag>-trtllm-python-py3`, or with a `base` our own on it. Empty: not known."""

    tag: str
    triton: str
    tensorrt_llm: str
    python: str
    tensorrt: str
    cuda: str
    driver: str
    base: str = ""

    @property
    def reference(self) -> str:
        return f"llmops:{self.tag}" if self.base else f"{REGISTRY}:{self.tag}-trtllm-python-py3"

    @property
    def recipe(self) -> str:
        """How it is made, for an image that is not pulled."""
        return (
            f"docker build -f Dockerfile.trtllm --build-arg BASE={self.tag} -t {self.reference} ." if self.base else ""
        )

    @property
    def targets(self) -> frozenset[str]:
        """`tensorrt` where `trtllm-build` and the C++ backend are, `pytorch` from 1.2 on: its LLM-API fields are the
        oldest that this package knows."""
        version = release(self.tensorrt_llm)
        engines = {"tensorrt"} if version < (1, 3) else set()
        return frozenset(engines | ({"pytorch"} if version >= (1, 2) else set()))


IMAGES = {
    image.tag: image
    for image in (
        Image("26.07", "2.71.0", "1.2.1", "3.12", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Image("26.06", "2.70.0", "1.2.1", "3.12", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Image("26.05", "2.69.0", "1.2.1", "3.12", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Image("26.04", "2.68.0", "1.2.1", "3.12", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Image("26.03", "2.67.0", "1.2.0", "3.12", "10.14.1.48", "13.1.0.036", "590.44.01"),
        Image("26.02", "2.66.0", "1.1.0", "3.12", "10.13.3.9", "13.0.2.006", "580.95.05"),
        Image("26.01", "2.65.0", "1.1.0", "3.12", "10.13.3.9", "13.0.2.006", "580.95.05"),
        Image("25.12", "2.64.0", "1.1.0", "3.12", "10.13.3.9", "13.0.2.006", "580.95.05"),
        Image("25.11", "2.63.0", "1.0.3.2510", "3.12", "10.13.3.9", "13.0.2.006", "580.95.05"),
        Image("25.10", "2.62.0", "1.0.0", "3.12", "10.11.0.33", "12.9.1.010", "575.57.08"),
        Image("trtllm-1.3", "2.51.0", "1.3.0rc29", "3.12", "", "13.2", "", f"{RELEASES}:1.3.0rc29"),
    )
}


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a TensorRT-LLM version. Raises VersionMismatchError for text that is none."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise VersionMismatchError(f"{version!r} is not a TensorRT-LLM version; give one like 1.2.1.") from None


def image_of(tag: str) -> Image:
    """The image with this tag (`26.07` or a full reference). Raises VersionMismatchError naming the known ones."""
    short = tag.rpartition(":")[2].removesuffix("-trtllm-python-py3")
    if short not in IMAGES:
        raise VersionMismatchError(
            f"no Triton image {tag!r} with TensorRT-LLM is known; known tags are {', '.join(IMAGES)}."
        )
    return IMAGES[short]


def image_for(target: str, tensorrt_llm: str) -> Image:
    """The newest image that serves what `target` built with this TensorRT-LLM version: exactly it for engines, its
    minor release for checkpoints. Raises VersionMismatchError where there is none."""
    fits = [image for image in IMAGES.values() if target in image.targets and _serves(image, target, tensorrt_llm)]
    if not fits:
        have = ", ".join(sorted({image.tensorrt_llm for image in IMAGES.values() if target in image.targets}))
        raise VersionMismatchError(
            f"no Triton image serves target {target} of TensorRT-LLM {tensorrt_llm}; there are images for {have}."
        )
    return fits[0]


def _serves(image: Image, target: str, tensorrt_llm: str) -> bool:
    if target == "tensorrt":
        return image.tensorrt_llm == tensorrt_llm
    return release(image.tensorrt_llm) >= release(tensorrt_llm)


def check_image(target: str, tensorrt_llm: str, tag: str) -> Image:
    """Refuse an image that cannot serve the engine, naming one that can."""
    image = image_of(tag)
    if target in image.targets and _serves(image, target, tensorrt_llm):
        return image
    right = image_for(target, tensorrt_llm)
    raise VersionMismatchError(
        f"image {image.tag} has TensorRT-LLM {image.tensorrt_llm}, but this engine (target {target}) needs "
        f"{tensorrt_llm}: use {right.reference}."
    )


def check_installed(target: str, tensorrt_llm: str, installed: str) -> None:
    """Refuse to run with a TensorRT-LLM that does not fit, naming the image that does."""
    same = installed == tensorrt_llm
    removed = target == "tensorrt" and release(installed) >= (1, 3)
    if same or (target == "pytorch" and release(installed) >= release(tensorrt_llm)):
        return
    why = "which no longer has TensorRT engines" if removed else "which cannot load it"
    raise VersionMismatchError(
        f"the engine (target {target}) was built for TensorRT-LLM {tensorrt_llm}, but {installed} is installed, {why}: "
        f"use {image_for(target, tensorrt_llm).reference}."
    )
