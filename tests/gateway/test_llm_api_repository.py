"""A `pytorch` engine with LoRA adapters on the real Triton and behind the gateway.

In the place of the tensorrt_llm library: the stand-in, as strict as 1.2.1 and as 1.3, which answers prompt+1, +2, … and
with an adapter prompt+2, +4, ….
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmops.build.trtllm.release_profiles import profiles_per_release as release_profiles
from llmops.errors import ServerError
from llmops.gateway.api.openai_chunks import chat_logprob_entry
from llmops.gateway.generation.choice import TokenLogprob
from llmops.gateway.settings import GatewaySettings
from llmops.model_repository.repository import compatibility
from tests.support.gateway_stack import serving
from tests.support.processes import commands, descendants
from tests.support.stack import ready_triton
from tests.support.tokenizer_files import TEMPLATE
from tests.support.waiting import eventually
from tests.trtllm.installed import adapter_repository, install_library

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llmops build --target pytorch --adapter …` and `llmops repo`."""
    pytest.importorskip("torch")
    return adapter_repository(tmp_path_factory.mktemp("llm-api"), TEMPLATE, tp=2)


# version, and the Python that runs the library in a process of its own (empty: Triton's stub does)
PLACES = [("1.2.1", ""), ("1.3.0rc29", sys.executable)]


@contextmanager
def running(made: Path, folder: Path, version: str, python: str = ""):
    repository = install_library(shutil.copytree(made, folder), version)
    if not version.startswith("1.2"):
        # as `llmops repo` announces where 1.3 is installed
        config = repository / "tiny-tensorrt_llm" / "config.pbtxt"
        config.write_text(config.read_text().replace('\\"top_logprobs\\": 0', '\\"top_logprobs\\": 20'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "installed_version", lambda name: version)
        patch.setenv("LLMOPS_TRTLLM_PYTHON", python)
        with ready_triton(repository) as server:
            yield server


@pytest.fixture(scope="module", params=PLACES, ids=str)
def server(request: pytest.FixtureRequest, made: Path, tmp_path_factory: pytest.TempPathFactory):
    with running(made, tmp_path_factory.mktemp("served") / "repository", *request.param) as started:
        yield started


@pytest.fixture
async def client(server):
    async with serving(GatewaySettings(triton=server.grpc_address, refresh="0.5s")) as (client, _):
        yield client


async def test_adapters_are_models_with_a_parent(client):
    models = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert set(models) == {"tiny", "tiny-sql"}
    assert (models["tiny"]["parent"], models["tiny-sql"]["parent"]) == (None, "tiny")


@pytest.mark.parametrize(("model", "step"), [("tiny", 1), ("tiny-sql", 2)])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_reaches_its_adapter(client, model, step, streaming):
    body = {"model": model, "prompt": [40, 50], "max_tokens": 6, "temperature": 0, "stream": streaming}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line not in ("", "data: [DONE]")]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    ids = [50 + step * i for i in range(1, 7)]
    assert text == (await client.post("/detokenize", json={"model": "tiny", "tokens": ids})).json()["prompt"]


async def test_the_most_likely_tokens_reach_the_client(client, request):
    """OpenAI's shapes; 1.2's sampler with penalties has none, and says so."""
    body = {"model": "tiny", "prompt": [40, 50], "max_tokens": 2, "temperature": 0, "logprobs": 2}
    response = await client.post("/v1/completions", json=body)
    if request.node.callspec.params["server"][0] == "1.2.1":
        assert response.status_code == 400
        assert response.json()["error"]["message"] == (
            "logprobs is at most 0 with target pytorch: only the chosen token's log-probability is known. "
            "TensorRT-LLM 1.3 has more without speculation, and 1.2 with `build --set llm.sampler_type=TorchSampler`."
        )
        return
    found = response.json()["choices"][0]["logprobs"]
    # prompt + 1 is sampled, and the two after it are the likeliest
    assert [list(place.values()) for place in found["top_logprobs"]] == [
        pytest.approx([-0.52, -0.53]), pytest.approx([-0.53, -0.54]),
    ]  # fmt: skip
    assert found["token_logprobs"] == pytest.approx([-90.51, -90.52])
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = [one["choices"][0]["logprobs"]["top_logprobs"] for one in events if one["choices"][0]["logprobs"]]
    assert [place for part in parts for place in part] == found["top_logprobs"]


async def test_the_prompts_log_probabilities_reach_the_client(client, request):
    """vLLM's shape: one list per prompt, null first; with 1.3 the prompt's own tokens are always there."""
    own = request.node.callspec.params["server"][0] != "1.2.1"
    body = {"model": "tiny", "prompt": [[40, 41, 60], [50, 52]], "n": 2, "max_tokens": 2, "prompt_logprobs": 1}
    response = await client.post("/v1/completions", json=body)
    found = [choice["prompt_logprobs"] for choice in response.json()["choices"]]
    assert [[place and sorted(place) for place in places] for places in found] == [
        *[[None, ["41"], ["42", *(["60"] * own)]]] * 2,
        *[[None, ["51", *(["52"] * own)]]] * 2,
    ]
    first = found[0][1]["41"]
    assert (first["logprob"], first["rank"]) == (pytest.approx(-0.1), 1)
    if own:
        assert (found[0][2]["60"]["logprob"], found[0][2]["60"]["rank"]) == (-5, None)
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "prompt_logprobs")
    long = await client.post("/v1/completions", json={**body, "prompt": [[5] * 80] * 64, "prompt_logprobs": 20})
    assert "are more than 100000 values" in long.json()["error"]["message"]


async def test_the_prompts_log_probabilities_of_a_chat_are_those_of_its_rendered_prompt(client, request):
    """vLLM's shape for chats: one list beside the choices, which share their prompt."""
    own = request.node.callspec.params["server"][0] != "1.2.1"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    ids = (await client.post("/tokenize", json=chat)).json()["tokens"]
    response = await client.post("/v1/chat/completions", json={**chat, "n": 2, "max_tokens": 2, "prompt_logprobs": 1})
    assert response.status_code == 200, response.text
    assert [set(place or ()) for place in response.json()["prompt_logprobs"]] == [
        set(), *({str(before + 1), *([str(token)] * own)} for before, token in itertools.pairwise(ids)),
    ]  # fmt: skip
    assert not any("prompt_logprobs" in choice for choice in response.json()["choices"])
    streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True, "prompt_logprobs": 1})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_chat_entry_has_its_alternatives():
    assert chat_logprob_entry(TokenLogprob(b"a", -1.5, 0, [(b"a", -1.5), (b"\xc3", -2.0)]))["top_logprobs"] == [
        {"token": "a", "logprob": -1.5, "bytes": [97]},
        {"token": "\ufffd", "logprob": -2.0, "bytes": [195]},
    ]


async def test_min_p_seeds_penalties_and_biases_are_announced_and_taken(client):
    can = (await client.get("/v1/models/tiny")).json()["capabilities"]
    assert [can[name] for name in ("min_p", "seed", "penalties", "logit_bias")] == [True] * 4
    body = {"model": "tiny", "prompt": [40, 50], "max_tokens": 2, "temperature": 0, "logit_bias": {"51": -100}}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    body = {"model": "tiny", "prompt": [40, 50], "max_tokens": 4, "min_p": 0.1, "seed": 3, "presence_penalty": 0.5}
    response = await client.post("/v1/completions", json={**body, "logprobs": 0})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx([-0.51, -0.52, -0.53, -0.54])


async def test_metrics_are_the_librarys_own(client, server, request):
    if request.node.callspec.params["server"][0] == "1.2.1":
        pytest.skip("before 1.3 statistics of several ranks grow without end in the library, and stay off")
    await client.post("/v1/completions", json={"model": "tiny", "prompt": [40, 50], "max_tokens": 4, "temperature": 0})
    wanted = {'kv_cache_block_type="reused"': "3", 'kv_cache_block_type="max"': "100", 'memory_type="gpu"': "5000"}

    def found() -> dict[str, str]:
        text = urllib.request.urlopen(server.metrics_url, timeout=30).read().decode().splitlines()
        return {label: line.split()[-1] for label in wanted for line in text if label in line}

    await eventually(lambda: found() == wanted)


def test_a_version_that_cannot_run_it_does_not_load(made, tmp_path):
    changed = shutil.copytree(made, tmp_path / "changed")
    path = changed / "tiny-tensorrt_llm" / "config.pbtxt"
    lines = path.read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"llm_profiles"' in line]
    arguments = {"backend": "pytorch", "speculative_config": {"decoding_type": "MTP", "acceptance_window": 4}}
    text = json.dumps(json.dumps([one.as_json() for one in release_profiles(arguments)]))
    lines[at] = f'parameters: {{ key: "llm_profiles" value: {{ string_value: {text} }} }}'
    path.write_text("\n".join(lines) + "\n")
    refused = pytest.raises(ServerError, match=r"cannot run this engine: .*acceptance_window")
    with refused, running(changed, tmp_path / "repository", "1.3.0rc29"):
        pass


async def test_an_engine_that_dies_is_told_to_everybody(client, server, request):
    """The token 510 kills the stand-in's worker, or a signal does. This is the last test of each server."""
    slow = {"model": "tiny", "prompt": [40, 60], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    asked, reason = [slow], r"its process ended with code -9"
    if request.node.callspec.params["server"][1]:
        workers = [pid for pid, command in commands().items() if "llmops_engine.runtimes.remote_worker" in command]
        (worker,) = set(workers) & set(descendants(server.pid))
        os.kill(worker, signal.SIGKILL)
    else:
        asked, reason = [slow, {**slow, "prompt": [40, 50, 500], "max_tokens": 300}], "TensorRT-LLM: "
    answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in asked))
    for answer in [*answers, await client.post("/v1/completions", json={**slow, "max_tokens": 2})]:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable"), answer.text
    with pytest.raises(ServerError, match=rf"tiny-tensorrt_llm has ended: {reason}"):
        server.wait(threading.Event())
