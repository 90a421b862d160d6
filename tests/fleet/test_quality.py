"""The quality watch: golden prompts, replicas that should be equal, and the one that is not."""

import json
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmops.errors import InputError, MissingDependencyError
from llmops.gateway.routing.quality.golden_prompts import load_golden_prompts
from llmops.gateway.routing.quality.quality_watch import MAX_SHADOW_TOKENS, QualityWatch, ShadowSample, compare_replicas
from llmops.gateway.settings import GatewaySettings, QualitySettings
from llmops.gateway.telemetry.metrics import GatewayMetrics
from tests.support.gateway_stack import replica_lines, serving
from tests.support.mock_engine.llmops_engine.runtimes.faults import command_faults
from tests.support.mock_engine.planned import constant
from tests.support.mock_engine.replicas import engines
from tests.support.waiting import eventually

GOOD, BAD = [[1, 2, 3, 4]] * 4, [[9, 9, 9, 9]] * 4
CLOSE = [[1, 2, 3, 5]] * 4


@pytest.mark.parametrize(
    ("answers", "reference", "outliers", "agreed"),
    [
        ({"a": GOOD, "b": GOOD, "c": GOOD}, None, [], True),
        ({"a": GOOD, "b": BAD, "c": GOOD}, None, ["b"], False),
        # roundings differ between batches
        ({"a": GOOD, "b": CLOSE}, None, [], True),
        # each of two accuses the other, until the past decides
        ({"a": GOOD, "b": BAD}, None, [], False),
        ({"a": GOOD, "b": BAD}, GOOD, ["b"], False),
        ({"a": BAD, "b": GOOD}, [*GOOD[:2], None, None], ["a"], False),
        # two that are wrong in the same way cannot be found
        ({"a": BAD, "b": BAD, "c": GOOD}, None, ["c"], False),
        ({"a": BAD, "b": BAD}, GOOD, [], False),
        # one that fails is not corrupted, and agrees with none
        ({"a": GOOD, "b": [None] * 4}, None, [], False),
        ({"a": GOOD}, None, [], False),
        ({}, None, [], False),
        ({"a": [[]] * 4, "b": [[]] * 4}, None, [], False),
    ],
)
def test_a_replica_that_differs_from_a_majority(answers, reference, outliers, agreed):
    assert compare_replicas(answers, reference) == (outliers, agreed)


def test_golden_prompts_of_a_file(tmp_path: Path):
    file = tmp_path / "golden.jsonl"
    file.write_text('{"id": "sum", "prompt": "2+2?", "expect": "\\\\b4\\\\b"}\n\n{"prompt": "Say it."}\n')
    first, second = load_golden_prompts(file)
    assert (first.score("It is 4."), first.score("It is 44."), second.score("?")) == (1.0, 0.0, None)
    for wrong in ("{", "[]", '{"id": 1}', '{"prompt": "a", "expect": "("}', '{"prompt": "a", "max_tokens": 0}', ""):
        file.write_text(wrong)
        with pytest.raises(InputError, match="golden"):
            load_golden_prompts(file)
    with pytest.raises(InputError, match="No such file"):
        load_golden_prompts(tmp_path / "none")
    own = load_golden_prompts(None)
    assert len(own) >= 20
    assert len({prompt.name for prompt in own}) == len(own)


def test_a_pattern_of_a_file_is_matched_in_linear_time(tmp_path: Path, monkeypatch):
    """Before the fix, this pattern held the gateway for minutes at an answer of 100 characters."""
    file = tmp_path / "golden.jsonl"
    file.write_text(json.dumps({"prompt": "a", "expect": "(.*)" * 20 + "ZZZ$"}))
    [slow], begun = load_golden_prompts(file), time.process_time()
    assert slow.score("a" * 4000) == 0
    assert time.process_time() - begun < 1
    for unknown in ("(?=a)", "(a)\\1", "(a{1000}){1000}"):
        file.write_text(json.dumps({"prompt": "a", "expect": unknown}))
        with pytest.raises(InputError, match=r"line 1 is not a golden prompt.* RE2"):
            load_golden_prompts(file)
    file.write_text('{"prompt": "a", "expect": "b"}')
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(MissingDependencyError, match=r"golden prompts .* need RE2, which is not installed"):
        load_golden_prompts(file)
    assert load_golden_prompts(None)


def test_a_shadow_sample_is_bounded():
    sample = ShadowSample(2)
    for token in range(100):
        sample.record("m", token.to_bytes(4, "little"))
    sample.record("m", bytes(4 * (MAX_SHADOW_TOKENS + 1)))
    assert (len(sample.take("m")), sample.take("m")) == (2, [])


async def test_texts_of_users_do_not_blind_the_comparison(tmp_path: Path, monkeypatch):
    """Before, one caller's texts on which healthy replicas differ outvoted the golden prompts."""
    file = tmp_path / "golden.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    shadow = ShadowSample(4)
    for token in range(4):
        shadow.record("m", token.to_bytes(4, "little"))
    watch = QualityWatch(QualitySettings(prompts=file, shadow=4), SimpleNamespace(pools=[]), GatewayMetrics(), shadow)
    model = SimpleNamespace(template=None, tokenizer=SimpleNamespace(encode=lambda text: [ord(text)]))
    good, other, bad = (SimpleNamespace(replica_id=name, model=model) for name in ("good", "other", "bad"))

    async def answers(replica, prompts):
        # the texts of users have as many right answers as there are replicas
        of_golden = [9 if replica is bad else 1] * 4
        return [of_golden if prompt[0] >= ord("a") else [hash((replica.replica_id, prompt))] for prompt in prompts]

    taken = []
    monkeypatch.setattr(watch, "_answers", answers)
    monkeypatch.setattr(watch, "_take_out", lambda *args: taken.append(args[2].replica_id))
    await watch._compare("m", "v", [good, other, bad])
    assert taken == ["bad"]


@pytest.mark.stack
@pytest.mark.xdist_group("own-triton")
async def test_a_replica_that_turns_bad_is_drained(engine_dir: Path, tmp_path: Path, caplog) -> None:
    faults = tmp_path / "faults.json"
    with engines(engine_dir, constant(0.002, 0.0, 2048, max_batch_size=8), 3, faults=faults) as stage:
        watched = GatewaySettings(replicas=stage.replicas, quality={"interval": "0.5s", "shadow": 2})
        async with serving(watched) as (client, _), serving(GatewaySettings(replicas=stage.replicas)) as (other, _):

            async def states(of) -> dict[str, str]:
                return {one["replica"].rpartition("/")[2]: one["state"] for one in await replica_lines(of, "mock")}

            async def all_ready() -> bool:
                found = await states(client)
                scored = "llm_quality_score{" in (await client.get("/metrics")).text
                return len(found) == 3 and set(found.values()) == {"ready"} and scored

            await eventually(all_ready)
            body = {"model": "mock", "prompt": "Hello there", "max_tokens": 4, "ignore_eos": True}
            before = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            assert "llmops_corrupted_replicas_total{" not in (await client.get("/metrics")).text

            with caplog.at_level(logging.ERROR):
                command_faults(faults, scramble=["mock-1"])

                async def taken_out() -> bool:
                    return (await states(client))["mock-1-tensorrt_llm"] == "gone"

                await eventually(taken_out)
            assert "CORRUPTED" in caplog.text
            assert "mock-1" in caplog.text
            assert (await states(client))["mock-0-tensorrt_llm"] == "ready"

            # the engine is drained, so that a gateway without a watch does not use it either
            async def unused() -> bool:
                return (await states(other))["mock-1-tensorrt_llm"] != "ready"

            await eventually(unused)
            for gateway in (client, other):
                for _ in range(8):
                    answer = await gateway.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["choices"][0]["text"] == before
