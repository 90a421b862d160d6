"""A TensorRT engine of two GPUs with `--serving llmops` on the real Triton and behind the gateway.

In the place of tensorrt_llm.bindings.executor: the stand-in, which answers prompt+1, +2, …. In the place of mpirun: a
program that starts the ranks.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from llmops.gateway.settings import GatewaySettings
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.repository import compatibility
from tests.support.gateway_stack import serving
from tests.support.manifests import engine_manifest
from tests.support.processes import commands, descendants
from tests.support.programs import install_program
from tests.support.stack import ready_triton
from tests.trtllm.installed import MPIRUN, install_executor

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton")]


def write_repository(root: Path) -> Path:
    """`llmops repo --serving llmops` of an engine without weights, and the library where Triton looks first."""
    from tests.support import tiny_models as models

    engine = root / "engine"
    (engine / "model").mkdir(parents=True)
    (engine / "tokenizer").mkdir()
    built = {"pretrained_config": {"mapping": {"tp_size": 2, "pp_size": 1}, "vocab_size": 512},
             "build_config": {"plugin_config": {"tokens_per_block": 4}}}  # fmt: skip
    (engine / "model" / "config.json").write_text(json.dumps(built))
    for rank in range(2):
        (engine / "model" / f"rank{rank}.engine").touch()
    models.write_tokenizer(engine / "tokenizer")
    tokenizer = {"vocab_size": 512, "bos_id": 1, "end_ids": [2], "pad_id": 0, "chat_template": False}
    extra = {"tensorrt_llm": "1.2.1"}
    engine_manifest("tensorrt", parallelism={"tp_size": 2}, tokenizer=tokenizer, extra=extra).save(engine)
    generate_repository(read_engines([str(engine)], serving="llmops"), root / "repository")
    install_executor(root / "repository" / "tiny-tensorrt_llm" / "1")
    return root / "repository"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("executor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "installed_version", lambda name: "1.2.1")
        install_program(patch, root / "bin" / "mpirun", MPIRUN.format(python=sys.executable))
        with ready_triton(write_repository(root)) as started:
            yield started


async def test_both_ranks_serve_one_model_with_its_cache_and_log_probabilities(server):
    started = [commands().get(pid, "") for pid in descendants(os.getpid())]
    assert sum("remote_worker" in words for words in started) == 3, "mpirun and a process for each rank"
    async with serving(GatewaySettings(triton=server.grpc_address, refresh="0.5s")) as (client, _):
        asked = {"model": "tiny", "prompt": list(range(40, 60)), "max_tokens": 3, "temperature": 0, "logprobs": 0}
        first = (await client.post("/v1/completions", json=asked)).json()
        again = (await client.post("/v1/completions", json=asked)).json()
        biased = await client.post("/v1/completions", json={**asked, "logit_bias": {"7": -3}})
    # 60, 61 and 62, of a tokenizer whose tokens are bytes in order
    assert first["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx([-0.6, -0.61, -0.62])
    # the last prompt token is always computed: four of five blocks
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again)] == [0, 16]
    assert biased.status_code == 200
