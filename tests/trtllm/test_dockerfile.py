"""Dockerfile.trtllm, which cannot be built here: what it copies makes the package, what it says is so."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llmops.build.installed import TRTLLM_PYTHON
from llmops.build.trtllm.versions import DEFAULT_TAG, IMAGES
from llmops.cli.main import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile.trtllm").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()


def arguments(name: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in INSTRUCTIONS if line.startswith(f"{name} ")]


def test_both_bases_and_their_labels_are_those_of_the_matrix() -> None:
    """`BASE` names a stage, and a stage is an image of the matrix."""
    given = dict(one.split("=") for one in arguments("ARG") if "=" in one)
    assert given == {"BASE": f"triton-{DEFAULT_TAG}", "RELEASE": IMAGES["trtllm-1.3"].tensorrt_llm}
    filled = {name: text.replace("${RELEASE}", given["RELEASE"]) for name, text in stages().items()}
    bases = {f"triton-{DEFAULT_TAG}": IMAGES[DEFAULT_TAG], "trtllm-1.3": IMAGES["trtllm-1.3"]}
    for stage, image in bases.items():
        reference, body = filled[stage].split("\n", 1)
        assert reference == (image.base or image.reference)
        labels = dict(re.findall(r'(\S+)="([^"]*)"', body))
        assert (labels["llmops.tensorrt-llm"], labels["llmops.triton"]) == (image.tensorrt_llm, image.triton)
        assert f"ENV LLMOPS_BASE_TENSORRT_LLM={image.tensorrt_llm} " in body
    assert IMAGES["trtllm-1.3"].recipe.split()[4:6] == ["--build-arg", "BASE=trtllm-1.3"]
    assert "assert v('tensorrt_llm') == os.environ['LLMOPS_BASE_TENSORRT_LLM']" in arguments("RUN")[-1]


def test_the_wheels_triton_and_tensorrt_llm_each_get_their_python() -> None:
    stage = stages()["trtllm-1.3"]
    wheel = re.search(r'(\S+)/bin/pip install \S+ "numpy<2" (nvidia-pytriton==\S+)', stage)
    assert f"{wheel[2]}\n" in (ROOT / "constraints.txt").read_text()
    assert f"LLMOPS_PYTHON={wheel[1]}/bin/python " in stage
    assert f"{TRTLLM_PYTHON}=/usr/bin/python3 " in stage
    assert f"PATH={wheel[1]}/bin:" in stage


def stages() -> dict[str, str]:
    """name -> what follows FROM, the reference first."""
    found: dict[str, str] = {}
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            reference, _, name = line.removeprefix("FROM ").partition(" AS ")
            found[name] = reference
        elif found:
            found[name] += f"\n{line}"
    return found


def test_what_is_copied_makes_the_whole_package(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source = tmp_path / "src"
    source.mkdir()
    for line in arguments("COPY"):
        *files, target = line.split()
        if files[0].startswith("--from"):
            continue
        for file in files:
            place = source / Path(target).relative_to("/src")
            copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copy
            copy(ROOT / file, place)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("llmops-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    data = [*ROOT.glob("model_repository/**/*.j2"), *ROOT.glob("model_repository/*/1/**/*.py")]
    modules = [
        path for folder in ("build", "model_repository", "gateway", "cli") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    for path in [*data, *modules]:
        assert f"llmops/{path.relative_to(ROOT)}" in names


def test_it_runs_as_nobody_special_and_is_reachable() -> None:
    assert arguments("USER") == ["10001"]
    assert "useradd --create-home --uid 10001" in arguments("RUN")[-1]
    assert json.loads(arguments("ENTRYPOINT")[0])[-1] == "llmops"
    command = json.loads(arguments("CMD")[0])
    serve = cli.get_command(None, command[0])
    context = serve.make_context("serve", command[1:], resilient_parsing=True)
    assert context.params["host"] == "0.0.0.0"
    assert set(arguments("EXPOSE")[0].split()) == {str(context.params[f"{one}_port"]) for one in ("grpc", "metrics")}
    check = arguments("HEALTHCHECK")[0]
    python, flag, code = json.loads(check[check.index("CMD") + 4 :])
    assert (python, flag) == ("python3", "-c")
    assert f"127.0.0.1:{context.params['grpc_port']}" in code
    # nothing listens here on a port that was free a moment ago
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = code.replace(str(context.params["grpc_port"]), str(port))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
