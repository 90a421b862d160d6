"""The file of step times: written, read again, and refused with the field that is wrong."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from llmops.build.plan.speed.measured_steps import MeasuredSteps, StepTime
from llmops.errors import InputError

STEP = {"phase": "decode", "batch_size": 1, "tokens": 1, "context": 0, "seconds": 0.01}
FILE = {
    "device": "Xeon", "model": "m", "architecture": "LlamaForCausalLM", "target": "openvino", "quantisation": "none",
    "kv_cache_dtype": "bf16", "steps": [STEP],
}  # fmt: skip


def test_steps_come_by_batch_tokens_and_context():
    steps = [
        StepTime(phase=phase, batch_size=batch, tokens=tokens, context=context, seconds=1.0)
        for phase in ("prefill", "decode")
        for batch in (2, 1)
        for tokens in (9, 8)
        for context in (5, 0)
    ]
    found = MeasuredSteps(**{**FILE, "steps": steps}).of_phase("decode")
    assert {step.phase for step in found} == {"decode"}
    assert [(step.batch_size, step.tokens, step.context) for step in found] == [
        (1, 8, 0), (1, 8, 5), (1, 9, 0), (1, 9, 5), (2, 8, 0), (2, 8, 5), (2, 9, 0), (2, 9, 5),
    ]  # fmt: skip


def test_what_is_saved_is_read_again(tmp_path):
    written = MeasuredSteps(**FILE)
    written.save(tmp_path / "host.json")
    text = (tmp_path / "host.json").read_text()
    assert MeasuredSteps.load(tmp_path / "host.json") == written
    assert json.loads(text)["format"] == 1
    assert text.splitlines()[1].startswith('  "')
    assert written.layout.model_dump() == {"tp_size": 1, "pp_size": 1, "ep_size": 1}
    assert written.steps[0].samples == 1
    with pytest.raises(ValidationError):
        written.device = "another"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"format": 2}, "format"),
        ({"steps": []}, "steps"),
        ({"more": 1}, "more"),
        ({"layout": {"tp_size": 0}}, "layout.tp_size"),
        ({"layout": {"pp_size": 0}}, "layout.pp_size"),
        ({"layout": {"ep_size": 0}}, "layout.ep_size"),
        *(({"steps": [STEP, {**STEP, field: value}]}, f"steps.1.{field}") for field, value in (
            ("phase", "draft"), ("batch_size", 0), ("tokens", 0), ("context", -1), ("seconds", 0), ("samples", 0),
        )),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(tmp_path, change, where):
    path = tmp_path / "host.json"
    path.write_text(json.dumps({**FILE, **change}))
    with pytest.raises(InputError) as caught:
        MeasuredSteps.load(path)
    assert caught.value.message.startswith(f"{path} does not hold measured step times ({where}: ")
    assert caught.value.message.endswith("; measure a host with `llmops verify --calibrate host.json`.")


def test_the_whole_file_is_wrong(tmp_path):
    path = tmp_path / "host.json"
    for text, words in (("[]", "does not hold measured step times (the file: "), ("{", "is not JSON (")):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            MeasuredSteps.load(path)
        assert words in caught.value.message
    with pytest.raises(InputError, match=r"none.json does not exist; measure"):
        MeasuredSteps.load(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"is not JSON \(.*Is a directory"):
        MeasuredSteps.load(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written \(No such file or directory\); create the folder first"):
        MeasuredSteps(**FILE).save(tmp_path / "no folder" / "host.json")


def test_steps_of_one_token_and_no_context_are_measurements(tmp_path):
    least = {**STEP, "context": 0, "samples": 1, "seconds": 1e-9}
    layout = {"tp_size": 1, "pp_size": 1, "ep_size": 1}
    assert MeasuredSteps(**{**FILE, "layout": layout, "steps": [least]}).steps[0].seconds == 1e-9
