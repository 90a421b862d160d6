"""The table of formats: each row is whole, and the names that it gives lead somewhere."""

from __future__ import annotations

import dataclasses

import pytest

from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.quant_formats import FORMATS, QuantFormat, buildable_formats
from llmops.build.target_facts import NAMES, TARGETS
from llmops.build.targets.build_target import get_target
from llmops.model_repository.targets import find_target


@pytest.mark.parametrize("left_out", ["algorithm", "made_here", "gemm", "moe", "loss", "targets", "compute"])
def test_a_row_that_leaves_something_out_cannot_be_imported(left_out):
    row = {field.name: getattr(FORMATS["fp8"], field.name) for field in dataclasses.fields(QuantFormat)}
    assert QuantFormat(**row) == FORMATS["fp8"]
    with pytest.raises(TypeError, match=left_out):
        QuantFormat(**{name: value for name, value in row.items() if name != left_out})


def test_presets_are_modelopts():
    mtq = pytest.importorskip("modelopt.torch.quantization")
    presets = [form.preset for form in FORMATS.values() if form.preset]
    assert len(presets) == 6
    assert [name for name in presets if not hasattr(mtq, name)] == []


@pytest.mark.parametrize(("field", "table", "column"), [("gemm", "gemm", "gemm_dtype"), ("moe", "moe", "moe_dtype")])
def test_names_of_measured_times_are_in_the_tables(field, table, column):
    from llmops.build.plan.timing.silicon import table_folder

    parquet, folder = pytest.importorskip("pyarrow.parquet"), table_folder(find_gpu("h200-sxm"))
    if folder is None:
        pytest.skip("AIConfigurator is not installed")
    measured = set(parquet.read_table(folder / f"{table}_perf.parquet", columns=[column])[column].to_pylist())
    named = {getattr(form, field) for form in FORMATS.values()} - {None}
    # W4A8 experts are in the tables of earlier releases only
    assert named - measured <= {"w4afp8"}


def test_every_target_can_be_built_served_and_has_formats():
    for name in NAMES:
        assert get_target(name).name == find_target(name).name == name
        assert TARGETS[name].quant in buildable_formats(name)
