"""The table of container images with TensorRT-LLM, as data.

Dockerfile.trtllm, `doctor`, dry runs, the chart, the files for several machines and the docs use
these paths and versions, and tests compare the Dockerfile and the docs with this table. A row names
the upstream file, commit and line of each fact (read 2026-11-23). An empty text means that no
upstream file has the fact.
"""

import csv
import io
import re
from dataclasses import dataclass

REGISTRY = "nvcr.io/nvidia/tritonserver"
RELEASES = "nvcr.io/nvidia/tensorrt-llm/release"
DEFAULT_TAG = "26.07"
#: Stage of Dockerfile.trtllm, and tag of the image, for releases without an image of Triton.
OWN_TAG = "trtllm-1.3"
#: Name of the image from the default stage of Dockerfile.trtllm, which serves `pytorch` on Triton's
#: image.
OWN_IMAGE = "llmops:trtllm"

_SERVER = "triton-inference-server/server"
_BACKEND = "triton-inference-server/tensorrtllm_backend"
_DOCKERFILE = "dockerfile/Dockerfile.triton.trt_llm_backend"
_COMPATIBILITY = f"{_SERVER} 819ee37770df docs/introduction/compatibility.md"


@dataclass(frozen=True)
class ImageLayout:
    """The paths in one kind of image.

    `python` is the interpreter with tensorrt_llm, and `ours` the interpreter into which llmops is
    installed. `server` and `backends` are empty if Triton is from the nvidia-pytriton wheel.
    `driver` lists the libraries of the driver, the only libraries that may be absent on a machine
    without a GPU. `driver_stubs` is the folder of stub libraries against which upstream's build
    links without a GPU.
    """

    python: str
    site_packages: str
    ours: str
    server: str = "/opt/tritonserver/bin/tritonserver"
    backends: str = "/opt/tritonserver/backends"
    backend_files: tuple[str, ...] = ("libtriton_tensorrtllm.so", "trtllmExecutorWorker")
    scripts: str = "/app/scripts"
    entrypoint: str = "/opt/nvidia/nvidia_entrypoint.sh"
    driver: tuple[str, ...] = ("libcuda.so.1", "libnvidia-ml.so.1")
    driver_stubs: str = "/usr/local/cuda/compat/lib.real"


_VENV = ImageLayout(
    python="/opt/venv-tritonserver/bin/python",
    site_packages="/opt/venv-tritonserver/lib/python3.12/site-packages",
    ours="/opt/venv-tritonserver/bin/python",
)
_SYSTEM = ImageLayout(
    python="/usr/bin/python3", site_packages="/usr/local/lib/python3.12/dist-packages", ours="/usr/bin/python3"
)
_RELEASE = ImageLayout(
    python="/usr/bin/python3",
    site_packages="/usr/local/lib/python3.12/dist-packages",
    ours="/opt/llmops/bin/python",
    server="",
    backends="",
    backend_files=(),
    scripts="",
)


@dataclass(frozen=True)
class TrtllmImage:
    """An image `tritonserver:<tag>-trtllm-python-py3`, or an image of llmops on `base`.

    `openai` is the version of the openai package in the image, and `openai_needed` the first
    version with which the image's tensorrt_llm.serve can be imported. Both versions are empty if
    the image needs no other version. `sources` names the upstream file of each fact.
    """

    tag: str
    triton: str
    tensorrt_llm: str
    torch: str
    tensorrt: str
    cuda: str
    driver: str
    layout: ImageLayout
    sources: dict[str, str]
    openai: str = ""
    openai_needed: str = ""
    transformers: str = ""
    python: str = "3.12"
    base: str = ""

    @property
    def reference(self) -> str:
        """Return the name of the image that runs TensorRT engines.

        `serving` has the name for a target.
        """
        return f"llmops:{self.tag}" if self.base else f"{REGISTRY}:{self.tag}-trtllm-python-py3"

    @property
    def stage(self) -> str:
        """Return the stage of Dockerfile.trtllm that starts from this image."""
        return self.tag if self.base else f"triton-{self.tag}"

    @property
    def own(self) -> str:
        """Return the name of the image that Dockerfile.trtllm makes for this release."""
        return self.reference if self.base else OWN_IMAGE

    def serving(self, target: str) -> str:
        """Return the image that serves `target`.

        The image is from Dockerfile.trtllm if the stock image lacks packages that `pytorch` needs.
        """
        return self.own if target == "pytorch" and self.openai_needed else self.reference

    def recipe(self, reference: str) -> str:
        """Return the docker command that makes `reference`, or an empty text if docker pulls it."""
        if reference != self.own:
            return ""
        stage = f"--build-arg BASE={self.tag} " if self.base else ""
        return f"docker build -f Dockerfile.trtllm {stage}-t {reference} ."

    @property
    def targets(self) -> frozenset[str]:
        """Return the targets that the image serves.

        An image serves `tensorrt` if it has `trtllm-build` and the C++ backend. An image serves
        `pytorch` since 1.2, the oldest release whose LLM-API fields this package knows.
        """
        minor = tuple(int(part) for part in re.findall(r"\d+", self.tensorrt_llm)[:2])
        engines = {"tensorrt"} if minor < (1, 3) else set()
        return frozenset(engines | ({"pytorch"} if minor >= (1, 2) else set()))


@dataclass(frozen=True)
class _Branch:
    """The upstream sources of a row: commits of Triton's release branches, and numbers of lines.

    `server` and `backend` are the commits of the two repositories, `row` is the line in the
    compatibility table, and the other fields are lines of build.py or of the backend's Dockerfile.
    """

    server: str
    backend: str
    row: int
    requirements: int
    libraries: str
    stubs: int
    install: int
    scripts: int
    venv: str = ""

    def sources(self) -> dict[str, str]:
        dockerfile = f"{_BACKEND} {self.backend} {_DOCKERFILE}"
        build = f"{_SERVER} {self.server} build.py"
        return {
            "triton": f"{_SERVER} {self.server} TRITON_VERSION:1",
            "versions": f"{_COMPATIBILITY}:{self.row}",
            "python": f"{dockerfile}:{self.venv or self.install}",
            "site_packages": f"{dockerfile}:{self.install}",
            "scripts": f"{dockerfile}:{self.scripts}",
            "openai": f"{_SERVER} {self.server} python/openai/requirements.txt:32, installed by build.py:"
            f"{self.requirements}",
            "backend_files": f"{build}:{self.libraries}",
            "driver_stubs": f"{build}:{self.stubs}",
        }


_OPENAI_NEEDED = {
    "openai_needed": "openai-python: PartReasoningText is absent from 1.107.3 and 1.108.0 and present in 1.109.1 and "
    "2.0.0; NVIDIA/TensorRT-LLM tensorrt_llm/serve/responses_utils.py imports it, and py_executor.py imports serve",
}
_TRANSFORMERS = {"transformers": "NVIDIA/TensorRT-LLM docs/source/release-notes.md, 1.2 (dependency changes)"}
_TORCH_25_12, _TORCH_25_10 = "2.10.0a0+b4e4ee81d3.nv25.12", "2.9.0a0+145a3a7bda.nv25.10"


def _row_since_2603(tag: str, triton: str, tensorrt_llm: str, branch: _Branch) -> TrtllmImage:
    """Return an image row of release 26.03 or later.

    Such an image has a virtual environment, and an openai that is too old for tensorrt_llm.serve.
    """
    return TrtllmImage(
        tag=tag, triton=triton, tensorrt_llm=tensorrt_llm, torch=_TORCH_25_12, tensorrt="10.14.1.48",
        cuda="13.1.0.036", driver="590.44.01", layout=_VENV, openai="1.107.3", openai_needed="1.109.1",
        transformers="4.57.3", sources={**branch.sources(), **_OPENAI_NEEDED, **_TRANSFORMERS},
    )  # fmt: skip


def _row_before_2603(tag: str, triton: str, tensorrt_llm: str, branch: _Branch) -> TrtllmImage:
    """Return an image row of releases 25.11 to 26.02.

    Such an image has the system's Python, and no target pytorch.
    """
    return TrtllmImage(
        tag=tag, triton=triton, tensorrt_llm=tensorrt_llm, torch=_TORCH_25_10, tensorrt="10.13.3.9",
        cuda="13.0.2.006", driver="580.95.05", layout=_SYSTEM, openai="1.107.3", sources=branch.sources(),
    )  # fmt: skip


_ROWS = (
    _row_since_2603("26.07", "2.71.0", "1.2.1",
            _Branch("819ee37770df", "3bc115373ce1", 41, 1238, "1938,1942", 1927, 164, 173, "132,121")),
    _row_since_2603("26.06", "2.70.0", "1.2.1",
            _Branch("690f9dd2c169", "e1611ce8612a", 42, 1193, "1893,1897", 1882, 163, 171, "132,121")),
    _row_since_2603("26.05", "2.69.0", "1.2.1",
            _Branch("34ca83e780bf", "a4f2f549f22f", 43, 1276, "2043,2047", 2032, 163, 171, "132,121")),
    _row_since_2603("26.04", "2.68.0", "1.2.1",
            _Branch("dd16c0cad039", "ce68ff5fd0a7", 44, 1264, "2031,2035", 2020, 163, 171, "132,121")),
    _row_since_2603("26.03", "2.67.0", "1.2.0",
            _Branch("f72de0733e63", "9736c4df0f5b", 45, 1263, "2030,2034", 2019, 163, 171, "132,121")),
    _row_before_2603("26.02", "2.66.0", "1.1.0",
           _Branch("cbaea23e0056", "47c80a359531", 46, 1256, "2066,2070", 2055, 182, 186)),
    _row_before_2603("26.01", "2.65.0", "1.1.0",
           _Branch("91c61c5d942d", "5b0830fc388c", 47, 1256, "2066,2070", 2055, 181, 185)),
    _row_before_2603("25.12", "2.64.0", "1.1.0",
           _Branch("f6d01881f53a", "5419275f0e98", 48, 1256, "2065,2069", 2054, 181, 185)),
    _row_before_2603("25.11", "2.63.0", "1.0.3.2510",
           _Branch("f30b53f554bf", "9f60afe80a27", 49, 1254, "2067,2071", 2056, 178, 182)),
    TrtllmImage(
        tag="25.10", triton="2.62.0", tensorrt_llm="1.0.0", torch="2.8.0a0+5228986c39.nv25.6",
        tensorrt="10.11.0.33", cuda="12.9.1.010", driver="575.57.08", layout=_SYSTEM, openai="1.107.3",
        sources=_Branch("dccbf87dd243", "e2e72dc83f72", 50, 1251, "2058,2062", 2047, 188, 192).sources(),
    ),
    TrtllmImage(
        tag=OWN_TAG, triton="2.51.0", tensorrt_llm="1.3.0rc29", torch="", tensorrt="", cuda="13.2", driver="",
        layout=_RELEASE, base=f"{RELEASES}:1.3.0rc29",
        sources={
            "triton": "nvidia-pytriton 0.7.0, the tritonserver in its wheel",
            "versions": "NVIDIA/TensorRT-LLM release v1.3.0rc29",
            "python": "our Dockerfile.trtllm: NVIDIA's release image has tensorrt_llm under the system's Python",
        },
    ),
)  # fmt: skip

IMAGES = {image.tag: image for image in _ROWS}


def bind_mount(source: str, target: str, *options: str) -> str:
    """Return the value of docker's `--mount` for a folder.

    Docker reads the value as a line of CSV, so a folder's name with a comma is quoted.
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={source}", f"target={target}", *options])
    return line.getvalue()
