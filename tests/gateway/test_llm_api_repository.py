"""A `pytorch` engine with LoRA adapters on the real Triton and behind the gateway.

In the place of the tensorrt_llm library: the stand-in with its published signatures, which answers prompt+1, +2, … and
with an adapter prompt+2, +4, ….
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from gateway_conftest import serving

from llmops.build.engine import build
from llmops.build.spec import BuildSpec
from llmops.gateway.settings import GatewaySettings
from llmops.model_repository import match
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.launch import Ports, start_triton

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]

TESTS = Path(__file__).parents[1]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llmops build --target pytorch --adapter …` and `llmops repo`, and the library where Triton looks first."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("llm-api")
    checkpoint = load(TESTS / "quantize" / "models.py").write_checkpoint(root / "checkpoint", "llama")
    adapter = load(TESTS / "trtllm" / "test_adapters.py").write_adapter(root / "adapter")
    options = {"adapters": {"tiny-sql": str(adapter)}}
    build(BuildSpec(str(checkpoint), root / "engine", "pytorch", "tiny", tp=2, max_batch_size=8, options=options))
    generate_repository(read_engines([str(root / "engine")]), root / "repository")
    library = root / "repository" / "tiny-tensorrt_llm" / "1" / "tensorrt_llm"
    library.mkdir()
    shutil.copyfile(TESTS / "trtllm" / "standin.py", library / "__init__.py")
    for name in ("executor", "llmapi"):
        (library / f"{name}.py").write_text("from tensorrt_llm import *\n")
    return root / "repository"


@pytest.fixture(scope="module")
def server(repository: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(match, "installed_version", lambda name: "1.2.1")
        with start_triton(repository, ports=Ports(0, 0, 0)) as running:
            running.wait_ready(120)
            yield running


@pytest.fixture
async def client(server):
    async with serving(GatewaySettings(triton=server.grpc_address, refresh_seconds=0.5)) as (client, _):
        yield client


async def test_adapters_are_models_with_a_parent(client):
    models = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert set(models) == {"tiny", "tiny-sql"}
    assert (models["tiny"]["parent"], models["tiny-sql"]["parent"]) == (None, "tiny")


@pytest.mark.parametrize(("model", "step"), [("tiny", 1), ("tiny-sql", 2)])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_reaches_its_adapter(client, repository, model, step, streaming):
    prompt = [40, 50]
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": streaming}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if streaming:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    else:
        text = response.json()["choices"][0]["text"]
    ids = [50 + step * i for i in range(1, 7)]
    expected = await client.post("/detokenize", json={"model": "tiny", "tokens": ids})
    assert text == expected.json()["prompt"]


async def test_what_the_llm_was_made_with_is_in_the_configuration(repository):
    text = (repository / "tiny-tensorrt_llm" / "config.pbtxt").read_text()
    (line,) = [line for line in text.splitlines() if '"llm_args"' in line]
    arguments = json.loads(json.loads(line.split("string_value: ")[1].rsplit(" } }", 1)[0]))
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["lora_config"]["max_lora_rank"] == 4
