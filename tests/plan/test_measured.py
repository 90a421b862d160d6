"""The file of measured step times: what is written is what is read, and a wrong file says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmops.build.plan.measured import Measured, StepTime
from llmops.errors import InputError

STEPS = [
    StepTime(phase="decode", batch_size=8, tokens=8, context=512, seconds=0.021, samples=40),
    StepTime(phase="prefill", batch_size=1, tokens=2048, context=0, seconds=0.19),
    StepTime(phase="decode", batch_size=1, tokens=1, context=128, seconds=0.0125, samples=64),
]
HOST = Measured(
    device="NVIDIA H100 80GB HBM3", gpu="h100-sxm", model="llama70b", architecture="LlamaForCausalLM",
    target="tensorrt", quantisation="fp8", kv_cache_dtype="fp8", steps=STEPS,
)  # fmt: skip


def test_a_file_read_back_is_what_was_measured(tmp_path: Path) -> None:
    HOST.save(tmp_path / "host.json")
    found = Measured.load(tmp_path / "host.json")
    assert found == HOST
    assert [step.batch_size for step in found.of_phase("decode")] == [1, 8]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [{**STEPS[0].model_dump(), "seconds": 0}]}, "steps.0.seconds"),
        ({"format": 2}, "format"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(json.dumps({**HOST.model_dump(), **change}))
    with pytest.raises(InputError, match=rf"\({named}: .*llmops verify --calibrate host\.json"):
        Measured.load(path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; measure a host with `llmops verify --calibrate"):
        Measured.load(tmp_path / "host.json")
