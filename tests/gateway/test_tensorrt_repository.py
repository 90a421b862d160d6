"""The generated repository of a TensorRT engine on the real Triton, with nothing but NVIDIA's backend swapped.

The engine model then is our Python one on the same checkpoint, built for OpenVINO; every other model, and of the engine
model all tensors, batching, policies and the card, are what `llmops repo` wrote for NVIDIA's C++ backend. Before it
loads, it reads its parameters as that backend does, and throws where it would (tests/trtllm/cpp_backend.py).
"""

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.errors import ServerError
from llmops.gateway.settings import GatewaySettings
from llmops.model_repository.generate import copy_model_code, generate_repository, read_engines
from tests.support.gateway_stack import serving
from tests.support.programs import install_program
from tests.support.stack import ready_triton
from tests.support.tiny_models import write_checkpoint

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]

ROOT = Path(__file__).parents[2]
ENGINE = "tiny-tensorrt_llm"
OWN = ("llmops_runtime", "openvino", "max_num_tokens", "max_queue_size")
AS_NVIDIA = f"""
import json
import cpp_backend
import own_model

class TritonPythonModel(own_model.TritonPythonModel):
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        cpp_backend.load({{k: v["string_value"] for k, v in parameters.items() if k not in {OWN}}})
        super().initialize(args)
"""
PROMPT, NEW_TOKENS = "The capital of", 24
TRTLLM_BUILD = """#!/bin/sh
echo '{}' > model/config.json && echo engine > model/rank0.engine && echo 'Serializing engine to model/rank0.engine'
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, trained for a moment so that its greedy text is no single byte."""
    pytest.importorskip("modelopt")
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", train_steps=40)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> str:
    """Return the greedy answer of transformers."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, len(ids) :].tolist())


@pytest.fixture(scope="module")
def generated(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llmops build --target tensorrt`, with a program in the place of trtllm-build, and `llmops repo`."""
    root = tmp_path_factory.mktemp("tensorrt")
    engine = root / "engine"
    with pytest.MonkeyPatch.context() as patch:
        install_program(patch, root / "bin" / "trtllm-build", TRTLLM_BUILD)
        options = {"quality": "false"}
        manifest, _ = build(BuildSpec(str(checkpoint), engine, "tensorrt", "tiny", max_batch_size=8, options=options))
        assert manifest.complete
        generate_repository(read_engines([str(engine)]), root / "repository")
    return root / "repository"


@pytest.fixture(scope="module")
def swapped(generated: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the backend of the engine model swapped, byte for byte the same otherwise."""
    root = tmp_path_factory.mktemp("swapped")
    manifest, _ = build(BuildSpec(str(checkpoint), root / "engine", name="tiny", max_batch_size=8))
    repository = shutil.copytree(generated, root / "repository")
    folder = repository / ENGINE
    copy_model_code("tensorrt_llm", folder / "1")
    (folder / "1" / "model.py").rename(folder / "1" / "own_model.py")
    (folder / "1" / "model.py").write_text(AS_NVIDIA)
    shutil.copy(ROOT / "tests" / "trtllm" / "cpp_backend.py", folder / "1")
    runtime = json.dumps(manifest.extra.openvino.model_dump(exclude_unset=True))
    own = dict(zip(OWN, ("openvino", runtime, str(manifest.limits.max_num_tokens), "32"), strict=True))
    lines = (folder / "config.pbtxt").read_text().splitlines()
    lines[lines.index('backend: "tensorrtllm"')] = 'backend: "python"'
    (path,) = [i for i, line in enumerate(lines) if '"gpt_model_path"' in line]
    lines[path] = parameter("gpt_model_path", str(root / "engine" / manifest.model_dir))
    lines += [parameter(key, value) for key, value in own.items()]
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return repository


def parameter(key: str, value: str) -> str:
    return f'parameters: {{ key: "{key}" value: {{ string_value: {json.dumps(value)} }} }}'


@pytest.fixture(scope="module")
def server(swapped: Path):
    with ready_triton(swapped, http=True) as running:
        yield running


def test_only_the_backend_was_swapped(generated: Path, swapped: Path) -> None:
    for path in [path for path in generated.rglob("*") if path.is_file()]:
        mine, theirs = (swapped / path.relative_to(generated)).read_text(), path.read_text()
        if path != generated / ENGINE / "config.pbtxt":
            assert mine == theirs, path
            continue
        changed = [line for line in theirs.splitlines() if line not in mine.splitlines()]
        assert (len(changed), changed[0], "gpt_model_path" in changed[1]) == (2, 'backend: "tensorrtllm"', True)
    text = (generated / ENGINE / "config.pbtxt").read_text()
    (line,) = [line for line in text.splitlines() if "xgrammar_tokenizer_info_path" in line]
    assert json.loads(Path(line.split('"')[3]).read_text())["encoded_vocab"][:3] == ["<pad>", "<s>", "</s>"]
    assert "dynamic_batching" in (swapped / ENGINE / "config.pbtxt").read_text()


def test_without_a_key_it_does_not_load_as_in_nvidias_backend(swapped: Path, tmp_path: Path) -> None:
    repository = shutil.copytree(swapped, tmp_path / "repository")
    path = repository / ENGINE / "config.pbtxt"
    lines = [line for line in path.read_text().splitlines() if '"tokenizer_dir"' not in line]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ServerError, match="Cannot find parameter with name: tokenizer_dir"), ready_triton(repository):
        pass


def generate(server, path: str, **fields) -> bytes:
    body = json.dumps({"text_input": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0.0, **fields}).encode()
    with urllib.request.urlopen(f"{server.http_url}/v2/models/tiny/{path}", body, timeout=60) as response:
        return response.read()


def test_the_ensemble_answers_with_the_models_text_streamed_or_not(server, expected: str) -> None:
    assert json.loads(generate(server, "generate"))["text_output"] == expected
    events = generate(server, "generate_stream", stream=True).decode().split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["text_output"] for event in events if event]
    assert len(texts) >= NEW_TOKENS
    assert "".join(texts) == expected


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_gateway_answers_with_the_models_text(server, expected: str, streaming: bool) -> None:
    settings = GatewaySettings(triton=server.grpc_address, refresh="0.5s")
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": streaming}
    async with serving(settings) as (client, _):
        card = (await client.get("/v1/models/tiny")).json()
        response = await client.post("/v1/completions", json=body)
    assert card["capabilities"]["logit_bias"] is True
    if not streaming:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "length")
        return
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events]
    assert ("".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"]) == (expected, "length")
