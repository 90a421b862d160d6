"""Figures of filters on labelled texts, and a classifier trained on vectors whose classes are known."""

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner

from llmops.cli.filter_evaluation import Example, evaluate, read_examples, train_head
from llmops.cli.main import cli
from llmops.errors import InputError
from llmops.gateway.safety.filters import FilterUnavailableError
from llmops.gateway.safety.rules import RuleFilter, rule_filter
from llmops.gateway.safety.services import ClassifierFilter, ClassifierHead, read_head

pytest.importorskip("re2")


def test_the_command_counts_recall_false_positives_and_leaks(tmp_path):
    filters = "{keys: {kind: rules, words: [swordfish], category: secrets}}"
    (tmp_path / "gateway.yaml").write_text(f"safety: {{filters: {filters}}}")
    rows = [(text, "secrets") for text in ("the word is swordfish", "SWORDFISH!", "sword fish")]
    lines = [json.dumps({"text": text, "category": category}) for text, category in (*rows, ("swordfish?", None))]
    (tmp_path / "examples.jsonl").write_text("\n".join([*lines, json.dumps({"text": "nothing"})]))
    words = ["safety", "test", str(tmp_path / "examples.jsonl"), "--config", str(tmp_path / "gateway.yaml")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "recall 2/3 (67%)  false positives 1/2 (50%)  leaked 0 characters" in result.output
    assert "missed: 'sword fish'" in result.output
    printed = CliRunner().invoke(cli, [*words, "--json"]).stdout
    (report,) = json.loads(printed[printed.index("{") :]).values()
    assert (report["found"], report["expected"], report["leaked_characters"]) == (2, 3, 0)


async def test_a_guard_that_leaks_is_noticed(monkeypatch):
    rule = rule_filter("keys", "secrets", ["a{4,40}b"], [], ignore_case=False)
    # as if the author of a rule had promised narrower matches than it has
    monkeypatch.setattr(rule, "width", 2)
    text = "x" * 100 + "a" * 40 + "b" + "x" * 100
    (report,) = (await evaluate({"keys": rule}, [Example(text, "secrets")])).values()
    assert isinstance(rule, RuleFilter)
    assert report.leaks > 0


WRONG = ["[]", '{"text": 5}', '{"category": "x"}', '{"text": "x", "category": 5}']


@pytest.mark.parametrize(("line", "why"), [("{", r" \(Expecting .*\)"), *((line, "") for line in WRONG)])
def test_a_line_that_is_no_example(tmp_path, line, why):
    path = tmp_path / "examples.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=f"line 2 is not an example{why};"):
        read_examples(path)


async def test_a_trained_head_separates_what_vectors_separate(tmp_path):
    random = np.random.default_rng(7)
    centres = {"": np.zeros(16), "hate": np.eye(16)[0] * 4, "fraud": np.eye(16)[1] * 4}
    vectors = {f"{category}-{n}": random.normal(centre, 1.0) for category, centre in centres.items() for n in range(80)}

    async def embed(texts):
        return np.array([vectors[text] for text in texts], dtype=np.float32)

    examples = [Example(text, text.split("-")[0]) for text in vectors]
    head = await train_head(examples, "minilm", embed, max_false_positives=0.05)
    assert min(head["recall"].values()) >= 0.8
    assert max(head["false_positives"].values()) <= 0.05 + 1 / 20
    (tmp_path / "head.json").write_text(json.dumps(head))

    async def embed_model(model, texts):
        assert model == "minilm"
        return np.array([centres["fraud" if "fraud" in text else ""] for text in texts])

    judge = ClassifierFilter("abuse", read_head(tmp_path / "head.json"), embed_model)
    # found in the last of several passages
    found = await judge.judge("a long and harmless text " * 60 + "fraud")
    assert found is not None
    assert found.category == "fraud"
    assert await judge.judge("a harmless text") is None


async def test_too_few_examples_are_refused():
    async def embed(texts):
        raise AssertionError

    with pytest.raises(InputError, match="Too few examples of hate: 3, where at least 8 are needed"):
        await train_head([Example("x")] * 9 + [Example("y", "hate")] * 3, "m", embed, max_false_positives=0.02)


async def test_a_head_judges_the_longest_text_without_holding_the_event_loop():
    """Before the fix, 4 MiB for `/v1/moderations` held the gateway for 2.6 s."""
    head = ClassifierHead("m", {f"c{number}": [0.01] * 384 + [-5.0] for number in range(13)}, {})

    async def embed(_model, texts):
        return np.ones((len(texts), 384), np.float32)

    judge = ClassifierFilter("abuse", head, embed)
    began = time.process_time()
    assert await judge.judge("word " * (4 * 2**20 // 5)) is None
    assert time.process_time() - began < 1.0
    with pytest.raises(FilterUnavailableError):
        await ClassifierFilter("abuse", head._replace(weights={"c": [1.0, 2.0]}), embed).judge("x")
