"""Triton from the wheel as in our TensorRT-LLM 1.3 image: Python 3.12, and a Python of its own, with numpy 2, for the
library. In the library's place: the stand-in, as 1.3.

`make test312` makes both virtual environments and runs this: LLMOPS_OTHER_PYTHON has llmops and nvidia-pytriton,
LLMOPS_LIBRARY_PYTHON has numpy >= 2 and none of them.
"""

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.manifests import engine_manifest
from tests.trtllm.installed import install_library

PYTHON, LIBRARY = (os.environ.get(f"LLMOPS_{name}_PYTHON", "") for name in ("OTHER", "LIBRARY"))
pytestmark = [
    pytest.mark.skipif(not (PYTHON and LIBRARY), reason="LLMOPS_OTHER_PYTHON names no other Python"),
    pytest.mark.stack,
    pytest.mark.xdist_group("stack"),
]
VERSION = "1.3.0rc29"


def evaluate(python: str, expression: str) -> str:
    code = f"import sys, numpy; from importlib.util import find_spec; print({expression})"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_environments_are_what_they_are_for() -> None:
    found = "sys.version_info[:2], int(numpy.__version__[0]), bool(find_spec('pytriton'))"
    assert evaluate(PYTHON, found) == "(3, 12) 1 True"
    assert evaluate(LIBRARY, found) == "(3, 12) 2 False"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A TensorRT-LLM as far as `llmops` looks at it: the name and version of an installed distribution."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "tensorrt_llm.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {VERSION}\n"
    (folder / "tensorrt_llm.dist-info" / "METADATA").write_text(metadata)
    return {
        **os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", "LLMOPS_TRTLLM_PYTHON": LIBRARY,
    }  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """`llmops repo` by the other Python, of an engine without weights."""
    root = tmp_path_factory.mktemp("other")
    engine = root / "engine"
    (engine / "model").mkdir(parents=True)
    (engine / "tokenizer").mkdir()
    (engine / "model" / "config.json").write_text("{}")
    tiny_models.write_tokenizer(engine / "tokenizer")
    tokenizer = {"vocab_size": 512, "bos_id": 1, "end_ids": [2], "pad_id": 0, "chat_template": False}
    extra = {"tensorrt_llm": VERSION, "llm_args": {"backend": "pytorch", "guided_decoding_backend": "xgrammar"}}
    engine_manifest("pytorch", tokenizer=tokenizer, extra=extra).save(engine)
    words = [PYTHON, "-m", "llmops.cli", "repo", str(engine), "-o", str(root / "repository")]
    subprocess.run(words, env=environment, check=True, capture_output=True)
    return install_library(root / "repository", VERSION)


def test_doctor_knows_the_image(environment: dict[str, str]) -> None:
    command = [PYTHON, "-m", "llmops.cli", "doctor", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["TensorRT-LLM"]["status"] == "ok"
    assert checks["TensorRT-LLM"]["detail"].startswith(f"{VERSION}, targets: pytorch")
    assert (checks["Triton"]["status"], checks["libpython"]["status"]) == ("ok", "ok")
    assert checks["Python backend stub"]["detail"] == "for Python 3.12"
    assert checks["extra embedded"]["status"] == "note"


def test_serve_starts_the_wheels_triton_and_answers(repository: Path, environment: dict[str, str]) -> None:
    ports = ["--http", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command = [PYTHON, "-m", "llmops.cli", "serve", str(repository), *ports]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        try:
            ready = serve.stdout.readline()
            url = re.search(r"HTTP (http://[\d.:]+)", ready)
            assert url, ready + serve.stderr.read()
            body = json.dumps({"text_input": "ab", "max_tokens": 3, "temperature": 0.0}).encode()
            with urllib.request.urlopen(f"{url[1]}/v2/models/tiny/generate", body, timeout=120) as response:
                text = json.loads(response.read())["text_output"]
        finally:
            serve.send_signal(signal.SIGTERM)
            serve.communicate(timeout=120)
    # the stand-in counts on from the last token of the prompt, and the tokenizer's tokens are bytes in order
    assert text == "cde"
    assert serve.returncode == 0
