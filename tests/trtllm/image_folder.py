"""A folder laid out like one of upstream's images, in which the instructions of Dockerfile.trtllm
are executed.

The layout is the image's row of facts (build/trtllm/container_images.py): a virtual environment whose Python
has tensorrt_llm (the stand-in), the metadata of the image's torch, transformers and openai, and a
system Python that has nothing. Absolute paths of the instructions are taken below the folder, and
pip has no index: it finds the wheels that a build may fetch in a folder.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from llmops.build.trtllm.container_images import TrtllmImage
from tests.support.programs import write_program

ROOT = Path(__file__).parents[2]
#: Absolute paths of the image, where they begin: what follows a letter, a closing brace or a dot is
#: no path.
_ABSOLUTE = re.compile(r"(?<![\w.$}/:-])/(?=(opt|usr|src|models|engines|home|app)\b)")
#: Programs that want a real root; what they would do does not matter here.
_HARMLESS = ("useradd", "chown")
_SERVE = "from openai.types.responses.response_content_part_added_event import PartReasoningText\n"
_OPENAI = (
    "openai/__init__.py",
    "openai/types/__init__.py",
    "openai/types/responses/__init__.py",
    "openai/types/responses/response_content_part_added_event.py",
)
_STANDIN = {
    "executor/__init__.py": "from tensorrt_llm import LoRARequest\n",
    "bindings/__init__.py": "",
    "llmapi/__init__.py": "from tensorrt_llm import *\n",
    "llmapi/llm_args.py": "from tensorrt_llm import TorchLlmArgs, update_llm_args_with_extra_dict\n",
    "serve/__init__.py": "",
    "serve/responses_utils.py": _SERVE,
    "_torch/__init__.py": "",
    "_torch/pyexecutor/__init__.py": "",
    "_torch/pyexecutor/py_executor.py": "import tensorrt_llm.serve.responses_utils\n",
}


class BuildFailedError(Exception):
    """An instruction of the Dockerfile ended with an error; the text is what it printed."""


class ImageFolder:
    """Executes instructions as `docker build` would. `environment` is what the image has at that
    point.
    """

    def __init__(self, root: Path, image: TrtllmImage) -> None:
        self.root, self.image, self.said = root, image, ""
        tools, wheels = root / "tools", root / "wheels"
        for folder in (tools, wheels, root / "src", root / "home" / "llmops"):
            folder.mkdir(parents=True)
        for name in _HARMLESS:
            write_program(tools / name, "#!/bin/sh\nexit 0\n")
        write_program(self.at("/usr/bin/python3"), f'#!/bin/sh\nexec {sys._base_executable} -I -S "$@"\n')
        self.site = self._virtual_environment()
        new = dict.fromkeys(_OPENAI, "") | {_OPENAI[-1]: "class PartReasoningText: ...\n"}
        _wheel(wheels, "openai", image.openai_needed, new)
        bin_folder = Path(self.at(image.layout.python)).parent
        self.environment = {
            "PATH": f"{bin_folder}:{tools}:/usr/bin:/bin",
            "NVIDIA_TRITON_SERVER_VERSION": image.tag, "LLMOPS_IMAGE_ROOT": str(root),
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore",
        }  # fmt: skip

    def at(self, path: str) -> Path:
        """Return where an absolute path of the image lies."""
        return self.root / path.lstrip("/")

    def build(self, instructions: list[str], arguments: dict[str, str]) -> None:
        """Execute `instructions` (each on one line). Raises BuildFailedError."""
        for line in instructions:
            word, _, text = line.partition(" ")
            if word == "ENV":
                for name, value in re.findall(r"(\w+)=(\S+)", text):
                    self.environment[name] = self._below(self._filled(value, arguments))
            elif word == "COPY":
                self._copy(text.split())
            elif word == "RUN":
                self.said = self.run(text.strip())

    def run(self, command: str) -> str:
        """Execute one shell command as the image would, and return its output. Raises
        BuildFailedError.
        """
        done = subprocess.run(
            ["sh", "-c", self._below(command)], env=self.environment, cwd=self.root, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BuildFailedError(f"{command[:80]}…: {done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def _virtual_environment(self) -> Path:
        """Return the site-packages of the venv that upstream makes, with what this test's Python
        has behind it.
        """
        folder = self.at(self.image.layout.python).parents[1]
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python3.*/site-packages")
        shared = [path for path in sys.path if path.endswith("site-packages")]
        (site / "shared.pth").write_text("\n".join(shared) + "\n")
        for name in ("tensorrt_llm", "torch", "transformers", "openai"):
            _distribution(site, name, str(getattr(self.image, name)))
        package = site / "tensorrt_llm"
        for name, text in _STANDIN.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text)
        shutil.copyfile(Path(__file__).with_name("standin.py"), package / "__init__.py")
        shutil.copyfile(Path(__file__).with_name("standin_executor.py"), package / "bindings" / "executor.py")
        (package / "VERSION").write_text(self.image.tensorrt_llm)
        backends = self.at(self.image.layout.backends) / "tensorrtllm"
        backends.mkdir(parents=True)
        for name in self.image.layout.backend_files:
            # any shared library whose own libraries are all found
            shutil.copyfile(_linked_library(), backends / name)
        for name in _OPENAI:
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text("")
        return site

    def _copy(self, words: list[str]) -> None:
        if words[0].startswith("--from"):
            return
        *sources, target = words
        for source in sources:
            place = self.at(target)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, place)

    def _filled(self, text: str, arguments: dict[str, str]) -> str:
        values = {**arguments, **self.environment}
        return re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], ""), text)

    def _below(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self.root}/", text)


def _linked_library() -> str:
    """A shared library whose own libraries and symbols the loader finds: the C library's mathematics."""
    maps = Path("/proc/self/maps").read_text()
    return next(line.split()[-1] for line in maps.splitlines() if "/libm.so" in line)


def _distribution(site: Path, name: str, version: str) -> None:
    """Write the metadata by which a version of `name` counts as installed."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("pip\n")
    owned = _OPENAI if name == "openai" else ()
    records = [*owned, *(f"{folder.name}/{file}" for file in ("METADATA", "INSTALLER", "RECORD"))]
    (folder / "RECORD").write_text("".join(f"{record},,\n" for record in records))


def _wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, **metadata}.items():
            archive.writestr(path, text)
        records = "".join(f"{path},,\n" for path in [*files, *metadata, f"{info}/RECORD"])
        archive.writestr(f"{info}/RECORD", records)


def interpreter_of(environment: dict[str, str], program: str) -> str:
    """Return the program that the image's PATH finds first."""
    return shutil.which(program, path=environment["PATH"]) or os.devnull
