"""Every cell of the families table in docs/tensorrt-llm.md: each format that a family is allowed on a target is
exported from a tiny random model and read back within its rounding bound."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from llmops.build.families import FAMILIES
from llmops.build.quantize.formats import FORMATS
from llmops.build.quantize.hf_files import HfFiles
from llmops.build.quantize.rank_files import RankFiles
from llmops.build.targets.nvidia.request import allowed_formats

_spec = importlib.util.spec_from_file_location("rank_file_tests", Path(__file__).with_name("test_rank_files.py"))
_tests = sys.modules["rank_file_tests"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_tests)

CELLS = [
    (family, quant, target)
    for target in ("tensorrt", "pytorch")
    for family in FAMILIES
    if target in FAMILIES[family].targets
    for quant in allowed_formats(family, target)
    if quant != "none" or target == "tensorrt"  # pytorch passes an unquantised checkpoint on as it is
]


@pytest.mark.parametrize(("family", "quant", "target"), CELLS)
def test_a_cell_of_the_table(export, family, quant, target):
    grouped = FORMATS[quant].grouped
    weights, folder, _ = export(family, quant, target=target, tp=2, group=128 if grouped else None)
    read = RankFiles(folder, family) if target == "tensorrt" else HfFiles(folder)
    tied = family.startswith("gemma")
    _tests.check_within_bounds(weights, read.model(), tied=tied, float16=target == "pytorch")
