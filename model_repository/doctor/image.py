"""Checks of a container against the known facts of its image, and of TensorRT-LLM.

The facts are in build/trtllm/container_images.py.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmops.build.environment import installed_version
from llmops.build.trtllm.container_images import DEFAULT_TAG, IMAGES, TrtllmImage
from llmops.model_repository.doctor import CheckResult
from llmops.model_repository.repository.compatibility import TAG_VARIABLE


def check_container() -> Iterator[CheckResult]:
    """Check the container that this process runs in."""
    tag = os.environ.get(TAG_VARIABLE, "unknown")
    found = IMAGES.get(tag)
    if found is None:
        known = f"{min(IMAGES)} to {max(IMAGES)}"
        detail = f"tag {tag}, TensorRT-LLM {installed_version('tensorrt_llm') or 'not installed'}"
        yield CheckResult("container image", "note", detail, f"the known trtllm-python-py3 images are {known}")
        return
    yield _versions(found)
    yield check_interpreter(found, Path("/"))
    yield check_openai(found)
    yield _home()


def check_driver(version: str, required: bool) -> CheckResult:
    """Check the NVIDIA driver against the version that the default image is built for.

    Args:
        version: The installed driver's version.
        required: True if the engines of this machine need GPUs, so that an old driver is a failure.
    """
    needed = IMAGES[DEFAULT_TAG].driver
    if _numbers(version) >= _numbers(needed):
        return CheckResult("NVIDIA driver", "ok", version)
    fix = f"image {DEFAULT_TAG} is built for {needed}: upgrade the driver (data-centre GPUs may do without)"
    return CheckResult("NVIDIA driver", "not ok" if required else "note", version, fix)


def check_interpreter(image: TrtllmImage, root: Path) -> CheckResult:
    """Check that the image's Python exists below `root`."""
    path = image.layout.python
    if (root / path.lstrip("/")).exists():
        return CheckResult("Python of TensorRT-LLM", "ok", path)
    fix = (
        f"this is not {image.reference}: start from that image, or correct its row in build/trtllm/container_images.py"
    )
    return CheckResult("Python of TensorRT-LLM", "not ok", f"{path} is missing, although image {image.tag} has it", fix)


def check_openai(image: TrtllmImage) -> CheckResult:
    """Check that openai is new enough for tensorrt_llm.serve.

    TensorRT-LLM's PyTorch backend imports tensorrt_llm.serve.
    """
    found, needed = installed_version("openai"), image.openai_needed
    if needed and (not found or _numbers(found) < _numbers(needed)):
        detail = f"{found or 'not installed'}; the PyTorch backend needs at least {needed}"
        return CheckResult("openai", "not ok", detail, f"{image.recipe(image.own)} (or pip install openai=={needed})")
    return CheckResult("openai", "ok", found or "not needed")


def _versions(image: TrtllmImage) -> CheckResult:
    installed = installed_version("tensorrt_llm")
    if not installed:
        return CheckResult("container image", "not ok", f"{image.tag} without TensorRT-LLM", f"use {image.reference}")
    if installed != image.tensorrt_llm:
        detail = f"{image.tag} should have TensorRT-LLM {image.tensorrt_llm}, but has {installed}"
        fix = f"use {image.reference} unchanged, because engines only run on the version that built them"
        return CheckResult("container image", "not ok", detail, fix)
    targets = ", ".join(sorted(image.targets)) or "none"
    return CheckResult("container image", "ok", f"{image.tag}, TensorRT-LLM {installed}, targets: {targets}")


def _home() -> CheckResult:
    """Check that HOME can be written: flashinfer creates folders there when it is imported.

    NVIDIA's image has no home directory for its own user.
    """
    home = Path(os.environ.get("HOME") or "/")
    if os.access(home, os.W_OK):
        return CheckResult("home directory", "ok", str(home))
    fix = "start the container with `--env HOME=/tmp --env USER=llmops`"
    return CheckResult("home directory", "not ok", f"{home} cannot be written, but libraries keep caches there", fix)


def check_tensorrt_llm() -> CheckResult:
    """Check TensorRT-LLM in NVIDIA's release image, to which our image adds a Triton."""
    from llmops.build.trtllm.image_selection import release_of
    from llmops.build.trtllm.release_profiles import CHECKED

    installed = installed_version("tensorrt_llm")
    if release_of(installed) in CHECKED:
        detail = f"{installed}, targets: pytorch; llmops was checked with {CHECKED[release_of(installed)]}"
        return CheckResult("TensorRT-LLM", "ok", detail)
    known = ", ".join(CHECKED.values())
    fix = f"llmops was checked with versions {known}; the library validates the arguments when an engine starts"
    return CheckResult("TensorRT-LLM", "note", f"{installed}, not checked", fix)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
