"""OpenVINO's runtime and our LLM-API model keep the contract on the real Triton; the mock engine: test_planted.py."""

from pathlib import Path

import pytest

from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.repository import compatibility
from tests.trtllm.installed import adapter_repository, install_library

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton"), pytest.mark.timeout(600)]


def test_the_embedded_engine(verify, tiny_engine: Path, tmp_path: Path) -> None:
    """`verify` starts the server itself, so that `drain` is tried too; test_plan_promises.py has the part `speed`."""
    page, parts = tmp_path / "report.html", ("contract", "answers", "capacity")
    only = [word for part in parts for word in ("--only", part)]
    found = verify("--engine", tiny_engine, "--html", page, "--textfile", tmp_path, *only)
    assert (found.report["faults"], found.code) == ([], 0)
    assert (found.named("refused"), found.named("unseen")) == ({"bad words", "logit bias", "adapters"}, set())
    assert {one["part"] for one in found.report["results"]} == set(parts)
    (answers,) = [one for one in found.report["results"] if one["name"] == "greedy answers"]
    # float32 against float32: what differs is paged attention's rounding
    assert answers["figures"]["agreement"] >= 0.99
    assert answers["figures"]["log_prob_difference"] < 0.005
    assert (tmp_path / "llmops_eval_tiny.prom").read_text().splitlines()[2::3] == [
        f'llm_eval_score{{eval="greedy",model="tiny"}} {answers["figures"]["agreement"]}',
        'llm_eval_baseline{eval="greedy",model="tiny"} 1.0',
    ]
    text = page.read_text()
    assert "This deployment does what it promised." in text
    assert text.count("<tr") >= len(found.report["results"])
    assert "step stream: drain" in found.named("works")
    assert "http://" not in text


@pytest.fixture(scope="module")
def llm_api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `pytorch` engine's repository with two adapters, the stand-in in the place of the tensorrt_llm library."""
    pytest.importorskip("torch")
    options = {"llm.guided_decoding_backend": "null"}
    return install_library(adapter_repository(tmp_path_factory.mktemp("llm-api"), options=options), "1.2.1")


def test_our_model_over_the_llm_api(verify, serve, llm_api: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "installed_version", lambda name: "1.2.1")
        served = serve(llm_api)
    found = verify(*served, "--only", "contract")
    assert (found.report["faults"], found.code, found.verdicts()["adapters"]) == ([], 0, "works")
    assert found.verdicts()["seeds"] == "works"
    # the stand-in answers prompt + 1, + 2, …: it repeats nothing
    assert found.named("unseen") >= {"penalties"}


def test_through_a_gateway(verify, serve, tiny_engine: Path, tmp_path: Path) -> None:
    from tests.support.stack import gateway

    generate_repository(read_engines([str(tiny_engine)]), tmp_path / "repository")
    with gateway(serve(tmp_path / "repository")[1], forked=True) as front:
        found = verify("--url", front.address, "--engine", tiny_engine)
        nobody = verify("--url", front.address, "--model", "nobody")
    assert (found.report["faults"], found.code, found.named("unseen")) == ([], 0, set())
    assert {"stop string", "JSON schema", "chat template and tokenizer", "greedy answers"} <= found.named("works")
    assert nobody.code == 1
    listed = "gateway, models: the gateway lists tiny, not nobody; name one of these with --model"
    assert nobody.report["faults"][0] == listed
