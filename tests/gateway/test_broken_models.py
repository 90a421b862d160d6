"""A model that cannot be served is that model's trouble alone, and the gateway says which one it is."""

import contextlib
import json
import logging
import shutil
import time

import pytest
from tritonclient.grpc import service_pb2

from llmops.gateway.app import create_app
from llmops.gateway.routing import triton_server
from llmops.gateway.routing.model_kinds import GenerativeKind
from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import app_client, serving
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.tokenizer_files import TEMPLATE
from tests.support.waiting import eventually


class TwoModels(ScriptedTriton):
    """`tiny`, and beside it `other` with a card of its own, or an error where a card should be."""

    def __init__(self, card: dict, other: dict | str) -> None:
        super().__init__(card, lambda tensors: [Step((0,)), Step(final=True)])
        self.other = other

    async def RepositoryIndex(self, request, context):
        answer = await super().RepositoryIndex(request, context)
        # before tiny in every order
        answer.models.add(name="other-tensorrt_llm", version="1", state="READY")
        return answer

    async def ModelConfig(self, request, context):
        if not request.name.startswith("other"):
            return await super().ModelConfig(request, context)
        if isinstance(self.other, str):
            await context.abort(13, self.other)
        answer = service_pb2.ModelConfigResponse()
        answer.config.parameters["llmops_model_metadata"].string_value = json.dumps(self.other)
        return answer


@contextlib.asynccontextmanager
async def beside(card: dict, other: dict | str):
    async with (
        TwoModels(card, other) as triton,
        serving(GatewaySettings(triton=triton.address, refresh="0.05s")) as (client, _),
    ):
        yield client, triton


def _panicking(file) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AA=="}
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": normalizer}))


def _one_high_id(file) -> None:
    spec = json.loads(file.read_text())
    spec["model"]["vocab"][next(reversed(spec["model"]["vocab"]))] = 20_000_000
    file.write_text(json.dumps(spec))


TEMPLATE_FAULT = "its chat template cannot be used"
TOKENIZER_FAULT = "its tokenizer cannot be read"
NESTED, NO_TEMPLATE = "{% if messages %}" * 300 + "{% endif %}" * 300, "{% if %}"
FAULTS = [
    ("chat_template.jinja", lambda file: file.write_text(NESTED), TEMPLATE_FAULT),
    ("chat_template.jinja", lambda file: file.write_text(NO_TEMPLATE), TEMPLATE_FAULT),
    ("tokenizer.json", lambda file: file.unlink(), TOKENIZER_FAULT),
    ("tokenizer_config.json", lambda file: file.write_text("[" * 100_000), TOKENIZER_FAULT),
    # before, no model of the server was served, and the list of models was never read again
    ("tokenizer.json", _panicking, TOKENIZER_FAULT),
    # before, the library printed 20 million numbers: 378 MB
    ("tokenizer.json", _one_high_id, TOKENIZER_FAULT),
]


@pytest.fixture
def other(card, tokenizer_dir, tmp_path):
    """A second model's card, with a tokenizer folder of its own that a test may break."""
    folder = tmp_path / "engines" / "other"
    shutil.copytree(tokenizer_dir, folder)
    return {**card, "name": "other", "tokenizer_dir": str(folder)}


def unready(problem: str) -> dict:
    return {"ready": False, "problem": problem}


@pytest.mark.parametrize(("name", "harm", "fault"), FAULTS)
async def test_the_others_are_served(card, other, tmp_path, caplog, name, harm, fault):
    harm(tmp_path / "engines" / "other" / name)
    problem = f"The model other cannot be served: {fault}; the gateway's log says why."
    with caplog.at_level(logging.WARNING):
        async with beside(card, other) as (client, _):
            ready = await client.get("/health/ready")
            expected = {"status": "degraded", "models": {"tiny": {"ready": True}, "other": unready(problem)}}
            assert (ready.status_code, ready.json()) == (200, expected)
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            assert (await client.post("/v1/chat/completions", json={"model": "tiny", **body})).status_code == 200
            refused = await client.post("/v1/chat/completions", json={"model": "other", **body})
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, problem)
            for url in ("/health/ready?model=other", "/health/ready?strict=true"):
                answer = await client.get(url)
                assert (answer.status_code, answer.json()["error"]["message"]) == (503, problem)
            assert (await client.get("/health/ready?model=tiny")).status_code == 200
            listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
            found = [listed["tiny"]["ready"], listed["other"]["ready"], listed["other"]["problem"]]
            assert found == [True, False, problem]
            assert (await client.get("/v1/models/other")).json() == listed["other"]
            for _ in range(5):
                await client.get("/health/ready")
    (said,) = [record.getMessage() for record in caplog.records if "other" in record.getMessage()]
    assert said.startswith(problem)
    assert len(said) > len(problem) + 5, "with the reason"


async def test_a_card_that_cannot_be_read_says_why(card, other):
    del other["max_seq_len"]
    async with beside(card, other) as (client, _):
        answer = await client.get("/health/ready?model=other")
        assert "max_seq_len: it is required" in answer.json()["error"]["message"]


async def test_a_card_that_triton_does_not_give_is_this_model_s_alone(card):
    async with beside(card, "boom in /opt/tritonserver/models/other") as (client, _):
        other = unready("The model other is not ready; try again later.")
        told = {"status": "degraded", "models": {"tiny": {"ready": True}, "other": other}}
        assert (await client.get("/health/ready")).json() == told


async def test_a_model_that_is_mended_is_served_and_one_that_breaks_is_not(card, other, tmp_path):
    folder = tmp_path / "engines" / "other"
    async with beside(card, other) as (client, triton):

        async def has_status(expected: str) -> bool:
            return (await client.get("/health/ready")).json()["status"] == expected

        assert await has_status("ready")
        (folder / "chat_template.jinja").write_text(NO_TEMPLATE)
        triton.other = {**other, "built": 1}
        await eventually(lambda: has_status("degraded"))
        body = {"model": "other", "messages": [{"role": "user", "content": "Hello"}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 503
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        triton.other = {**other, "built": 2}
        await eventually(lambda: has_status("ready"))
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_broken_model_that_takes_long_to_load_is_not_loaded_again_and_again(card, other, tmp_path, monkeypatch):
    """Before, callers of other models waited for 2 s every 30 s, while a tokenizer of 35 MB was read again."""
    (tmp_path / "engines" / "other" / "chat_template.jinja").write_text(NO_TEMPLATE)
    monkeypatch.setattr(triton_server, "RELOAD_INTERVAL", 0.0)
    attempts = []

    def template(self, tokenizer, name):
        attempts.append(name)
        time.sleep(0.1)
        raise ValueError(name)

    async with beside(card, other) as (client, triton):
        monkeypatch.setattr(GenerativeKind, "_template", template)
        triton.other = {**other, "built": 1}
        await eventually(lambda: attempts)
        for _ in range(10):
            assert (await client.get("/health/ready")).json()["status"] == "degraded"
    assert attempts == ["other"]


async def test_a_gateway_whose_only_model_is_broken_is_not_ready(card, tokenizer_dir, tmp_path):
    folder = tmp_path / "only"
    shutil.copytree(tokenizer_dir, folder)
    (folder / "chat_template.jinja").write_text(NESTED)
    triton = ScriptedTriton({**card, "tokenizer_dir": str(folder)}, lambda tensors: [])
    async with triton, app_client(create_app(GatewaySettings(triton=triton.address, refresh="0.05s"))) as one:
        answer = await one.get("/health/ready")
        assert (answer.status_code, TEMPLATE_FAULT in answer.json()["error"]["message"]) == (503, True)
