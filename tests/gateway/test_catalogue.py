"""The catalogue watches several servers, reads each once per look, and knows where every model is."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field

import pytest
from tritonclient.grpc import service_pb2

from llmops.gateway.errors import ModelNotFoundError, UnavailableError
from llmops.gateway.http.request_context import UNKNOWN_CALLER
from llmops.gateway.routing.model_registry import create_model_registry
from llmops.gateway.routing.served_models import EmbeddingModel, GenerativeModel
from llmops.gateway.settings import GatewaySettings
from llmops.units import Seconds
from tests.support.scripted_triton import ScriptedTriton, Step

NEVER = 3600.0


@dataclass
class Shared(ScriptedTriton):
    """Its `more` models stand beside the one of `card`; `indexed` counts how often its repository was read."""

    more: dict[str, dict] = field(default_factory=dict)
    indexed: int = 0

    async def RepositoryIndex(self, request, context):
        self.indexed += 1
        answer = await super().RepositoryIndex(request, context)
        for name in self.more:
            answer.models.add(name=name, version="1", state="READY")
        return answer

    async def ModelConfig(self, request, context):
        answer = service_pb2.ModelConfigResponse()
        card = self.more.get(request.name, self.card)
        answer.config.parameters["llmops_model_metadata"].string_value = json.dumps(card)
        return answer


@contextlib.asynccontextmanager
async def watching(*tritons: ScriptedTriton, catalogue=None):
    for triton in tritons:
        await triton.start()
    settings = GatewaySettings(refresh=Seconds(NEVER))
    made = (catalogue or create_model_registry)(settings, [f"127.0.0.1:{triton.port}" for triton in tritons])
    await made.start()
    try:
        yield made
    finally:
        await made.close()
        for triton in tritons:
            await triton.stop()


def one_token(tensors):
    return [Step((5,)), Step(final=True)]


@pytest.fixture
def encoder_card(card):
    shape = {"max_batch_size": 8, "max_seq_len": 32, "dimensions": 3, "kind": "embedding", "contract": 1}
    return {name: card[name] for name in ("target", "tokenizer_dir", "vocab_size")} | shape | {"name": "vectors"}


def ready_at(catalogue, name) -> dict[str, bool]:
    return {place.replica.rpartition(":")[2]: place.ready for place in catalogue.places(name, GenerativeModel)}


async def test_a_model_on_two_servers_is_one_with_two_places(card):
    first, second = Shared(card, one_token), Shared(card, one_token)
    async with watching(first, second) as catalogue:
        assert [found.model.name for found in catalogue.all()] == ["tiny"]
        assert ready_at(catalogue, "tiny") == {str(first.port): True, str(second.port): True}
        assert await catalogue.check_answer("tiny", 30) is None
        assert (len(first.requests), len(second.requests)) == (1, 0)

        first.state = "UNAVAILABLE"
        standing = await catalogue.check_readiness()
        assert (standing.ready, standing.broken, standing.problem) == ({"tiny": "tiny"}, {}, None)
        assert ready_at(catalogue, "tiny") == {str(first.port): False, str(second.port): True}
        assert await catalogue.check_answer("tiny", 30) is None
        assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_a_server_that_goes_takes_only_its_own_models(card):
    first, second = Shared(card, one_token), Shared({**card, "name": "other"}, one_token)
    async with watching(first, second) as catalogue:
        await first.stop()
        standing = await catalogue.check_readiness()
        assert standing.ready == {"other": "other"}
        assert standing.broken == {"tiny": "The model tiny is not ready."}
        assert standing.problem is None
        # known, so that its engine and not the list says what is wrong
        assert catalogue.of(GenerativeModel).get("tiny", UNKNOWN_CALLER).name == "tiny"
        with pytest.raises(ModelNotFoundError):
            catalogue.of(GenerativeModel).get("nobody", UNKNOWN_CALLER)

        assert await catalogue.check_answer("nobody", 1) == "The model nobody is no longer there."

        await second.stop()
        assert (await catalogue.check_readiness()).problem == "Triton is not ready."
        await catalogue.refresh()
        with pytest.raises(UnavailableError, match=r"Triton cannot be reached\."):
            catalogue.of(GenerativeModel).get("nobody", UNKNOWN_CALLER)


async def test_all_kinds_are_found_in_one_reading(card, encoder_card):
    triton = Shared(card, one_token, more={"vectors-embedding": encoder_card})
    async with watching(triton) as catalogue:
        assert triton.indexed == 1
        assert [found.model.name for found in catalogue.all()] == ["tiny", "vectors"]
        assert catalogue.of(EmbeddingModel).get("vectors", UNKNOWN_CALLER).card.dimensions == 3
        for name, kind in (("tiny", EmbeddingModel), ("vectors", GenerativeModel)):
            with pytest.raises(ModelNotFoundError):
                catalogue.of(kind).get(name, UNKNOWN_CALLER)
        await catalogue.check_readiness()
        assert triton.indexed == 2
