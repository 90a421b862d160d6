"""Checks of everything in an image that works without a GPU: `llmops doctor --deep`.

The checks are the last step of `docker build`.

The outcome is `seen` (it ran here), `failed`, or `needs a GPU`: a library of the driver is missing,
which the release's facts list (build/trtllm/container_images.py). Any other missing library or
symbol is a failure.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from llmops.build.environment import installed_version
from llmops.build.trtllm.container_images import IMAGES, TrtllmImage
from llmops.errors import LlmopsError
from llmops.model_repository.doctor import launch_commands, library_probe, probe_cases, sample_models
from llmops.model_repository.generate import copy_model_code
from llmops.model_repository.multi_gpu.launch_plan import LaunchPlan
from llmops.model_repository.repository.compatibility import TAG_VARIABLE
from llmops.model_repository.server.installation import find_installation

DeepCheckOutcome = Literal["seen", "failed", "needs a GPU"]
#: Environment variable with the tag of the image's row in the table of facts. Dockerfile.trtllm
#: sets the variable.
IMAGE_VARIABLE = "LLMOPS_IMAGE"
#: Parts of the errors of torch and CUDA on a machine without a driver. Other such errors name a
#: library of the driver.
_WITHOUT_DRIVER = ("Found no NVIDIA driver", "no CUDA-capable device", "CUDA driver version is insufficient")
#: Maximum seconds in which the library must import and construct its arguments. An import takes
#: minutes on a slow disk.
_TIMEOUT = 900


@dataclass(frozen=True)
class DeepCheckResult:
    """The result of one deep check. `detail` has the finding, and after a failure the fix."""

    name: str
    outcome: DeepCheckOutcome
    detail: str = ""


def run_deep_checks(root: Path = Path("/")) -> Iterator[DeepCheckResult]:
    """Check the image below `root`. Without an image, check this machine's Triton and library."""
    tag = os.environ.get(IMAGE_VARIABLE) or os.environ.get(TAG_VARIABLE, "")
    image = IMAGES.get(tag)
    if tag and image is None:
        yield DeepCheckResult(
            "image", "failed", f"no facts are known about image {tag}; build from one of {', '.join(IMAGES)}"
        )
        return
    if image is not None:
        python = root / image.layout.python.lstrip("/")
        if not python.exists():
            wanted = f"{image.layout.python}, the Python of image {tag}, is missing"
            yield DeepCheckResult("image", "failed", f"{wanted}: start from {image.base or image.reference}")
            return
        yield from check_python_library(image, root, str(python))
        yield from check_cpp_backend(image, root)
    elif installed_version("tensorrt_llm"):
        yield from _run_library_probe(None, root, sys.executable)
    yield from _triton(image)


def any_failed(found: list[DeepCheckResult]) -> bool:
    """Return True if a check failed. Checks that need a GPU do not count as failed."""
    return any(one.outcome == "failed" for one in found)


def check_python_library(image: TrtllmImage, root: Path, python: str) -> Iterator[DeepCheckResult]:
    """Check the versions and the Python library of an image.

    The checks run under the Python that has the library.
    """
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    for name in ("tensorrt_llm", "torch", "transformers", "openai"):
        wanted = image.openai_needed if name == "openai" else str(getattr(image, name))
        run = subprocess.run([python, "-c", code, name], capture_output=True, text=True, check=False)
        version = run.stdout.strip() or "not installed"
        if wanted in ("", version):
            yield DeepCheckResult(f"version of {name}", "seen", version)
        else:
            detail = f"{version}, but the image's facts name {wanted}: build from the release in the facts"
            yield DeepCheckResult(f"version of {name}", "failed", detail)
    yield from _run_library_probe(image, root, python)


def _run_library_probe(image: TrtllmImage | None, root: Path, python: str) -> Iterator[DeepCheckResult]:
    """Make the engine model's library calls under the Python that has the library."""
    with tempfile.TemporaryDirectory() as folder:
        copy_model_code("tensorrt_llm", Path(folder))
        task = json.dumps({"code": folder, **probe_cases.make_probe_task(image)})
        try:
            run = subprocess.run(
                [python, library_probe.__file__], input=task, capture_output=True, text=True, timeout=_TIMEOUT,
                check=False,
                env=_with_stubs(image, root),
            )  # fmt: skip
            results: list[tuple[str, str]] = json.loads(run.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            yield DeepCheckResult(
                "library", "failed", f"{python} ended without a result ({error}): build the image again"
            )
            return
    for name, problem in results:
        yield DeepCheckResult(name, classify_error(problem, image), problem)


def classify_error(error: str, image: TrtllmImage | None) -> DeepCheckOutcome:
    """Return the outcome of a check from its error text, which is empty after a success."""
    if not error:
        return "seen"
    driver = image.layout.driver if image is not None else next(iter(IMAGES.values())).layout.driver
    return "needs a GPU" if any(text in error for text in (*driver, *_WITHOUT_DRIVER)) else "failed"


def _with_stubs(image: TrtllmImage | None, root: Path) -> dict[str, str]:
    """Return the environment with the driver's stub libraries.

    The stubs come from CUDA's compatibility package, as in NVIDIA's own builds.
    """
    stubs = root / image.layout.driver_stubs.lstrip("/") if image is not None else None
    if stubs is None or not stubs.is_dir():
        return dict(os.environ)
    return {**os.environ, "LD_LIBRARY_PATH": f"{stubs}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def check_cpp_backend(image: TrtllmImage, root: Path) -> Iterator[DeepCheckResult]:
    """Check the C++ backend's files, and that the loader finds each file's shared libraries."""
    for name in image.layout.backend_files:
        path = root / image.layout.backends.lstrip("/") / "tensorrtllm" / name
        if not path.is_file():
            yield DeepCheckResult(f"backend: {name}", "failed", f"{path} is missing: start from {image.reference}")
            continue
        linked = subprocess.run(["ldd", "-r", str(path)], capture_output=True, text=True, check=False)
        yield parse_ldd_output(name, linked.stdout + linked.stderr, image)


def parse_ldd_output(name: str, output: str, image: TrtllmImage) -> DeepCheckResult:
    """Return the outcome of `ldd -r` for one file.

    Missing libraries, except the driver's, and symbols that no library has are faults.
    """
    name, lines = f"backend: {name}", output.splitlines()
    missing = [line.split()[0] for line in lines if "not found" in line]
    other = [one for one in missing if one not in image.layout.driver]
    if other:
        return DeepCheckResult(
            name, "failed", f"the loader does not find {', '.join(other)}: start from {image.reference}, which has them"
        )
    if missing:
        return DeepCheckResult(name, "needs a GPU", f"{', '.join(missing)} come with the driver")
    undefined = [line.split()[2] for line in lines if line.startswith("undefined symbol:")]
    if undefined:
        return DeepCheckResult(
            name,
            "failed",
            f"no library has the symbol {undefined[0]} ({len(undefined)} missing symbols in all): build the image "
            "again from an unchanged base",
        )
    return DeepCheckResult(name, "seen", "all shared libraries and symbols are found")


def _triton(image: TrtllmImage | None) -> Iterator[DeepCheckResult]:
    """Check model configurations, the command lines of `llmops serve`, and a running server.

    The server runs two models, a tokenizer and a detokenizer.
    """
    with tempfile.TemporaryDirectory(prefix="llmops-doctor-", ignore_cleanup_errors=True) as folder:
        for name, check in _triton_checks(Path(folder)):
            try:
                yield DeepCheckResult(name, "seen", check())
            except (LlmopsError, ValueError) as error:
                yield DeepCheckResult(name, classify_error(str(error), image), str(error))


def _triton_checks(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each check with a function that runs the check and returns its result."""
    for target, serving in sample_models.TARGETS:
        name = f"config.pbtxt: {target}{f', served by {serving}' if serving else ''}"
        yield name, partial(sample_models.parse_sample_configs, folder / f"{target}-{serving}", target, serving)
    for plan in launch_commands.PLANS:
        yield f"command line: {plan.mode}", partial(_parse_commands, plan)
    yield "tritonserver", partial(sample_models.tokenizer_round_trip, folder / "served")


def _parse_commands(plan: LaunchPlan) -> str:
    return f"{launch_commands.parse_launch_commands(find_installation(), plan)} options"
