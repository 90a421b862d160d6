"""Select the container image for a target and a TensorRT-LLM version.

`container_images` has the table of images.

1.3.0rc20 is the last TensorRT-LLM with TensorRT engines (NVIDIA/TensorRT-LLM release notes), and
26.07, with 1.2.1, the last Triton image with TensorRT-LLM. Since 1.3, the image is from
Dockerfile.trtllm: NVIDIA's release image of TensorRT-LLM with the tritonserver of the
nvidia-pytriton wheel.
"""

from llmops.build.trtllm.container_images import DEFAULT_TAG, IMAGES, OWN_IMAGE, TrtllmImage
from llmops.errors import VersionMismatchError


def release_of(version: str) -> tuple[int, int]:
    """Return the release line of a TensorRT-LLM version, as major and minor number.

    Raises:
        VersionMismatchError: The text is not a version.
    """
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise VersionMismatchError(f"{version!r} is not a TensorRT-LLM version; give one like 1.2.1.") from None


def image_of(tag: str) -> TrtllmImage:
    """Return the image with this tag (`26.07` or a full reference).

    Raises:
        VersionMismatchError: The tag is unknown. The message lists the known tags.
    """
    if tag == OWN_IMAGE:
        return IMAGES[DEFAULT_TAG]
    short = tag.rpartition(":")[2].removesuffix("-trtllm-python-py3")
    if short not in IMAGES:
        raise VersionMismatchError(
            f"No Triton image {tag!r} with TensorRT-LLM is known; known tags are {', '.join(IMAGES)}."
        )
    return IMAGES[short]


def image_for(target: str, tensorrt_llm: str) -> TrtllmImage:
    """Return the newest image that serves engines of `target` from this TensorRT-LLM version.

    A TensorRT engine needs the same version. A checkpoint needs the same minor release, or a later
    version.

    Raises:
        VersionMismatchError: No image serves the version.
    """
    fits = [image for image in IMAGES.values() if target in image.targets and _serves(image, target, tensorrt_llm)]
    if not fits:
        available = ", ".join(sorted({image.tensorrt_llm for image in IMAGES.values() if target in image.targets}))
        raise VersionMismatchError(
            f"No Triton image serves target {target} of TensorRT-LLM {tensorrt_llm}; images exist for {available}."
        )
    return fits[0]


def _serves(image: TrtllmImage, target: str, tensorrt_llm: str) -> bool:
    if target == "tensorrt":
        return image.tensorrt_llm == tensorrt_llm
    return release_of(image.tensorrt_llm) >= release_of(tensorrt_llm)


def check_image(target: str, tensorrt_llm: str, tag: str) -> TrtllmImage:
    """Return the image of a tag.

    Raises:
        VersionMismatchError: The image cannot serve the engine. The message names an image that
            can.
    """
    image = image_of(tag)
    if target in image.targets and _serves(image, target, tensorrt_llm):
        return image
    right = image_for(target, tensorrt_llm)
    raise VersionMismatchError(
        f"Image {image.tag} has TensorRT-LLM {image.tensorrt_llm}, but this engine (target {target}) needs "
        f"{tensorrt_llm}: use {right.serving(target)}."
    )


def check_trtllm_installed(target: str, tensorrt_llm: str, installed: str) -> None:
    """Check that an installed TensorRT-LLM fits an engine.

    Raises:
        VersionMismatchError: The installed version does not fit. The message names an image that
            fits.
    """
    same = installed == tensorrt_llm
    removed = target == "tensorrt" and release_of(installed) >= (1, 3)
    if same or (target == "pytorch" and release_of(installed) >= release_of(tensorrt_llm)):
        return
    why = "which no longer has TensorRT engines" if removed else "which cannot load it"
    raise VersionMismatchError(
        f"The engine (target {target}) was built for TensorRT-LLM {tensorrt_llm}, but {installed} is installed, {why}: "
        f"use {image_for(target, tensorrt_llm).serving(target)}."
    )
