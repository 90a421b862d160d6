"""What the engine study makes of its samples and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmops.errors import InputError
from llmops.perf.lab.engine.study import PEER, Sample, parse, ratios, table


def _samples() -> list[Sample]:
    # the machine is half as fast in the second round: rates halve, their ratio stays
    return [
        Sample(PEER, 1, tokens=100, seconds=1.0, cpu_seconds=2.0),
        Sample("int8", 1, tokens=100, seconds=0.5, cpu_seconds=1.0),
        Sample(PEER, 1, tokens=100, seconds=2.0, cpu_seconds=4.0),
        Sample("int8", 1, tokens=100, seconds=1.0, cpu_seconds=1.2),
    ]


def test_ratios_compare_within_a_round() -> None:
    assert ratios(_samples(), "int8", 1) == [2.0, 2.0]


def test_table_shows_best_median_ratio_and_least_cpu() -> None:
    assert "| int8 | 200 (150) | 2.00 | 10.00 |" in table(_samples(), [PEER, "int8"], [1])


def test_an_engine_folder_and_properties_are_read(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "openvino_model.xml").touch()
    name, model, properties = parse(f"a,NUM_STREAMS=1,ENABLE_CPU_PINNING=false={tmp_path}")
    assert (name, model) == ("a,NUM_STREAMS=1,ENABLE_CPU_PINNING=false", tmp_path / "model")
    assert properties == {"NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}


@pytest.mark.parametrize("entry", ["folder-without-name", "name=/nowhere"])
def test_what_is_no_engine_is_refused(entry: str) -> None:
    with pytest.raises(InputError, match="does not name an OpenVINO engine"):
        parse(entry)
