"""The time of a first token tells whether another tenant has sent the same prompt."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmops.cli.filter_evaluation import Example
from llmops.cli.router_training import train_router
from llmops.gateway.app import create_app
from llmops.gateway.generation.app_state import AppState
from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.interfaces import Caller
from llmops.gateway.settings import GatewaySettings, OidcSettings
from tests.attacks.harness import record, scaled
from tests.gateway.test_auto_model import auto, user, vectors_of
from tests.support.model_code import put_on_path

pytest.importorskip("openvino_genai")


@pytest.fixture
def runtime(engine_dir: Path) -> Any:
    put_on_path("tensorrt_llm")
    from llmops_engine.runtimes.openvino import OpenVINOOptions, OpenVINORuntime

    manifest = json.loads((engine_dir / "engine.json").read_text())
    own = manifest["extra"]["openvino"]
    vocabulary, places = manifest["tokenizer"]["vocab_size"], (own["properties"], own["kv_cache"])
    options = OpenVINOOptions(engine_dir / "model", 4, 4096, vocabulary, 512, 8192, "CPU", *places)
    with closing(OpenVINORuntime(options)) as made:
        yield made


def first_token(runtime: Any, salt: int, seed: int) -> float:
    """Return the CPU seconds until the first token of a prompt that `seed` makes."""
    from llmops_engine.request import RuntimeRequest

    ids = np.random.default_rng(seed).integers(100, 40_000, scaled(384, 2048))
    request = RuntimeRequest(input_ids=ids, max_new_tokens=1, cache_salt=salt)
    assert runtime.prepare(request) is None
    runtime.submit(1, request, 0)
    start = time.process_time()
    while runtime.has_work():
        list(runtime.step())
    return time.process_time() - start


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
def test_a_tenant_does_not_learn_what_another_has_asked(runtime: Any) -> None:
    assert first_token(runtime, 0, seed=1) > 5 * first_token(runtime, 0, seed=1), "without tenants prompts are cached"
    first_token(runtime, salt=11, seed=2)
    guess, other = first_token(runtime, salt=12, seed=2), first_token(runtime, salt=12, seed=3)
    record(f"the victim's prompt {guess * 1000:.0f} ms, another one {other * 1000:.0f} ms")
    assert guess > other / 3
    assert guess < other * 3
    assert list(runtime.take_kv_events())[-1].names == (), "no block is announced as cached"


@pytest.mark.parametrize("settings", [{}, {"cache_scope": "tenant"}, {"cache_scope": "shared"}])
def test_a_gateway_keeps_tenants_apart_in_front_of_one_server_too(settings: dict[str, Any]) -> None:
    service: AppState = create_app(GatewaySettings(**settings)).state.service
    salts = {service.cache_salt(caller) for caller in ("a/1", "a/2", "b/1")}
    assert (len(salts), service.cache_salt("")) == (2 if settings.get("cache_scope") == "tenant" else 1, 0)


def test_the_tenants_of_tokens_share_no_prefixes() -> None:
    """Before the fix, tenants that only an OIDC issuer names shared the cache of a gateway without a store."""
    issuer = OidcSettings(issuer="https://id.example", audience="llmops")
    assert GatewaySettings(oidc=issuer).tenants_apart
    assert not GatewaySettings(oidc=issuer, cache_scope="shared").tenants_apart


async def test_the_head_of_an_alias_embeds_each_tenants_texts(tmp_path: Path) -> None:
    """A text without an embedding took 50 ms more than one that another tenant had sent."""
    words = [f"{'prove' if number % 2 else 'say'} it {number}" for number in range(60)]
    examples = [Example(text, "large" if "prove" in text else "") for text in words]
    path, asked = tmp_path / "router.json", []
    path.write_text(json.dumps(train_router(examples, "minilm", vectors_of(words), max_missed=0.05)[0]))

    async def embed(name: str, texts: list[str]) -> Any:
        asked.extend(texts)
        return vectors_of(texts)

    model = auto(embed=embed, head=path)
    for tenant in ("victim", "victim", "attacker"):
        caller = Caller(tenant_id=tenant, user_id=f"{tenant}-user")
        await model.choose("auto", user("say that we buy Northwind"), RequestContext("r", caller=caller))
    assert len(asked) == 2, "once for each tenant"
