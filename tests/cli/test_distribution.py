"""The distribution: its name, the install commands in messages, and a stranger's files in the package."""

import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from llmops import distribution
from llmops.model_repository.doctor.machine import EXTRAS
from tests.support.environments import new_environment

ROOT = Path(__file__).parents[2]
TEXTS = ("*.md", "*.py", "*.toml", "*.txt", "*.yaml", "*.tpl", "*.j2", "Makefile", "Dockerfile*")
#: The extras that only the Makefile installs.
OF_THE_PROJECT = {"test", "lint", "mutate"}
# PyPI's `llmops` as it was on the day of writing: an empty package
STRANGER = {
    "llmops/__init__.py": "",
    "llmops-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: llmops\nVersion: 0.1.0\n",
    "llmops-0.1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "llmops-0.1.0.dist-info/RECORD": "llmops/__init__.py,,\nllmops-0.1.0.dist-info/METADATA,,\n"
    "llmops-0.1.0.dist-info/WHEEL,,\nllmops-0.1.0.dist-info/RECORD,,\n",
}


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with our wheel, its constraints, and the stranger's wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    for name in run("git", "ls-files", "--", ":!docs", ":!tests", ":!deploy", ":!perf/lab", cwd=ROOT).stdout.split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*pip, "-w", folder, source, cwd=folder)
    (folder / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())
    with ZipFile(folder / "llmops-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in STRANGER.items():
            wheel.writestr(name, text)
    return folder


@pytest.fixture
def python(tmp_path: Path, wheels: Path) -> Path:
    """Return the Python of a new environment that has our wheel, and the libraries of this one."""
    found = new_environment(tmp_path / "venv")
    run(found, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", *wheels.glob("llmops_t*"), cwd=tmp_path)
    return found


def test_a_wheel_names_itself_with_its_constraints_in_the_command_that_adds_an_extra(python, wheels, tmp_path):
    script = "from llmops.distribution import install_command; print(install_command('store'))"
    wheel = next(wheels.glob("llmops_t*.whl"))
    said = shlex.split(run(python, "-c", script, cwd=tmp_path).stdout)
    assert said == [*(str(python), "-m", "pip", "install"), *("-c", f"{wheels}/constraints.txt", f"{wheel}[store]")]


def test_a_stranger_over_our_package_is_one_sentence_and_the_repair_works(python, wheels, tmp_path):
    command = python.with_name("llmops")
    assert run(command, "--version", cwd=tmp_path).stderr == ""
    stranger = wheels / "llmops-0.1.0-py3-none-any.whl"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", stranger, cwd=tmp_path)
    broken = run(command, "--version", cwd=tmp_path, check=False)
    assert broken.returncode == 1
    assert broken.stderr.startswith("Error: The Python package `llmops` does not belong to llmops-triton: ")
    assert "Traceback" not in broken.stderr

    # installed again, the package works, and a start says that the stranger would still take files with it
    ours = next(wheels.glob("llmops_t*.whl"))
    run(python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", ours, cwd=tmp_path)
    warned = run(command, "--version", cwd=tmp_path).stderr
    assert warned.startswith("Warning: llmops 0.1.0 has installed files into this package")
    repair = warned.partition("Repair with: ")[2]
    run("sh", "-c", repair, cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).stderr == ""


def test_a_checkout_is_named_as_it_is_reached_from_here(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    wanted = ["-c", "constraints.txt", "-e", ".[store,kafka]"]
    assert shlex.split(distribution.install_command("store", "kafka"))[-4:] == wanted
    monkeypatch.chdir(tmp_path)
    assert shlex.split(distribution.install_command())[-3:] == [str(ROOT / "constraints.txt"), "-e", str(ROOT)]


def test_no_text_tells_a_user_to_install_the_distribution_llmops():
    listed = subprocess.run(["git", "ls-files", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = re.compile(r"pip3? install [^\n`]*\bllmops(?![-_./\w])|llmops\[")
    files = [ROOT / name for name in listed.split() if name != "tests/cli/test_distribution.py"]
    texts = {file: file.read_text().splitlines() for file in files if file.is_file()}
    assert not [f"{file}: {line}" for file, lines in texts.items() for line in lines if named.search(line)]


@pytest.mark.parametrize("name", ["Dockerfile.build", "Dockerfile.gateway", "Dockerfile.trtllm"])
def test_each_image_has_all_that_setup_installs(name):
    """setuptools only warns of a module that is not there, as of the one that the command `llmops` imports."""
    setup = (ROOT / "setup.py").read_text()
    (folders,) = re.findall(r"FOLDERS = \((.*)\)", setup)
    (modules,) = re.findall(r"py_modules=\[(.*)\]", setup)
    wanted = {"llmops", "setup.py", "setup.cfg", "pyproject.toml", *re.findall(r'"(\w+)"', folders)}
    wanted |= {f"{module}.py" for module in re.findall(r'"(\w+)"', modules)}
    copied = re.findall(r"^COPY (?!--)(.*) /src", (ROOT / name).read_text(), re.M)
    assert wanted <= {word for line in copied for word in line.split()}


def test_pip_replaces_libraries_with_which_tritons_client_cannot_be_imported():
    """The image of 26.07 has a gRPC and a protobuf already, and pip keeps what no requirement rules out."""
    from packaging.requirements import Requirement
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {one.name: one for one in map(Requirement, project["dependencies"])}
    (made,) = re.findall(r"Protobuf Python Version: (.*)", Path(service_pb2.__file__).read_text())
    assert made in found["protobuf"].specifier
    assert not found["protobuf"].specifier.contains(re.sub(r"\d+$", lambda last: str(int(last[0]) - 1), made))
    assert found["tritonclient"].extras == {"grpc"}
    rules = map(Requirement, importlib.metadata.requires("tritonclient") or [])
    (grpc,) = [one.specifier for one in rules if one.name == "grpcio" and one.marker.evaluate({"extra": "grpc"})]
    assert str(grpc) == f">={service_pb2_grpc.GRPC_GENERATED_VERSION}"


def test_doctor_lists_every_extra():
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    known = set(re.findall(r"^([a-z]+) = \[$", extras, re.M))
    assert set(EXTRAS) == known - OF_THE_PROJECT
