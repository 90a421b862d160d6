"""Every checkpoint that `build` can make for an engine holds exactly the tensors that 1.2.1 loads, rank by rank.

By default every family and format once, with the KV caches in turn; LLMOPS_EVERY_CELL=1 runs the whole table. Where
`tensorrt_llm` is installed its own classes load the same files (test_the_real_loader).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmops.build.formats import FORMATS, format_of
from llmops.build.model.families import FAMILIES
from llmops.build.target_names import TARGETS
from llmops.build.targets.nvidia.build_request import allowed_formats

pytest.importorskip("modelopt")


def _module(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
required = _module("trtllm_required", HERE / "required.py")
models = _module("trtllm_models", HERE.parent / "quantize" / "models.py")

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
EXPERTS = 4
KV_ALGORITHM = {"auto": None, "fp8": "FP8", "int8": "INT8"}
# everything that `build --target tensorrt` accepts: family x format x KV cache
CELLS = [
    (family, quant, kv)
    for family in FAMILIES
    if "tensorrt" in FAMILIES[family].targets
    for quant in allowed_formats(family, "tensorrt")
    for kv in TARGETS["tensorrt"].kv_caches
]
if not os.environ.get("LLMOPS_EVERY_CELL"):
    CELLS = [CELLS[start + start // 3 % 3] for start in range(0, len(CELLS), 3)]
# and other layouts: one GPU, more GPUs than KV heads, pipeline stages
LAYOUTS = [(family, tp, pp) for family in required.KINDS for tp, pp in ((1, 1), (4, 1), (2, 2))]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    from llmops.build.checkpoint import open_checkpoint

    made = {}

    def get(family):
        if family not in made:
            experts = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
            folder = models.write_checkpoint(tmp_path_factory.mktemp(family), family, **SMALL, **experts)
            made[family] = open_checkpoint(str(folder))
        return made[family]

    return get


@pytest.fixture
def export(source, tmp_path):
    from llmops.build.progress import SilentProgress
    from llmops.build.quantize.calibration import CalibrationSettings
    from llmops.build.quantize.experts import split_experts
    from llmops.build.quantize.export import export_engine_checkpoint
    from llmops.build.quantize.loading import load_model, load_tokenizer
    from llmops.build.quantize.quantizer import quantize

    def run(family, quant, kv="auto", tp=2, pp=1, dtype=None):
        checkpoint, form = source(family), format_of(quant, "tensorrt")
        model = load_model(checkpoint)
        split_experts(model)
        settings = CalibrationSettings(size=1, seq_len=8)
        group = group_of(quant, tp)
        quantize(model, load_tokenizer(checkpoint), form, kv, group, settings, SilentProgress())
        export_engine_checkpoint(model, checkpoint.architecture, form, tmp_path / "c", tp, pp, dtype)
        return tmp_path / "c"

    return run


def group_of(quant, tp):
    """Attention's output is cut to 128 / tp inputs; on one GPU the group is what every format takes."""
    return 128 // tp if FORMATS[quant].grouped else None


def sizes_of(family, quant, tp):
    small = {name.removeprefix("num_").removesuffix("_size"): value for name, value in SMALL.items()}
    experts = EXPERTS if required.KINDS[family].moe else 0
    return required.Sizes(
        vocab=models.SIZES["vocab_size"], hidden=small["hidden"], intermediate=small["intermediate"],
        layers=small["hidden_layers"], heads=small["attention_heads"], kv_heads=small["key_value_heads"],
        head=small["head_dim"], experts=experts, group=group_of(quant, tp) or 0,
    )  # fmt: skip


def check_tensors(folder, family, quant, kv, tp, pp):
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    algorithm = FORMATS[quant].algorithm
    assert config["quantization"]["quant_algo"] == algorithm
    assert config["quantization"]["kv_cache_quant_algo"] == KV_ALGORITHM[kv]
    assert config["logits_dtype"] == "float32"
    for rank in range(tp * pp):
        wanted = required.required(family, sizes_of(family, quant, tp), algorithm, KV_ALGORITHM[kv], tp, pp, rank)
        with safe_open(folder / f"rank{rank}.safetensors", "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            shared = [name for name in found if name.endswith("prequant_scaling_factor") and len(found[name]) == 2]
            for name in shared:  # preprocess_weights takes the first expert's for all
                assert (file.get_tensor(name) == file.get_tensor(name)[0]).all(), name
        # the two halves of kv_cache_scaling_factor, which preprocess_weights would join
        found = {name: shape for name, shape in found.items() if ".k_cache_" not in name and ".v_cache_" not in name}
        assert found == wanted, (rank, sorted(found.items() ^ wanted.items()))


@pytest.mark.parametrize(("family", "quant", "kv"), CELLS)
def test_each_cell_has_what_the_engine_loads(export, family, quant, kv):
    check_tensors(export(family, quant, kv), family, quant, kv, 2, 1)


@pytest.mark.parametrize(("family", "tp", "pp"), LAYOUTS)
def test_each_layout_has_what_the_engine_loads(export, family, tp, pp):
    check_tensors(export(family, "fp8", "fp8", tp, pp), family, "fp8", "fp8", tp, pp)


@pytest.mark.skipif(find_spec("tensorrt_llm") is None, reason="tensorrt_llm is not installed")
@pytest.mark.parametrize(("family", "quant", "kv"), CELLS)
def test_the_real_loader(export, family, quant, kv):
    """What trtllm-build does first; it raises for a tensor that is missing or of another shape."""
    from tensorrt_llm.models import MODEL_MAP

    folder = export(family, quant, kv, tp=1 if FORMATS[quant].groups == (128,) else 2)
    config = json.loads((folder / "config.json").read_text())
    for rank in range(config["mapping"]["world_size"]):
        MODEL_MAP[config["architecture"]].from_checkpoint(str(folder), rank)


def test_the_table_has_every_engine_family():
    assert set(required.KINDS) == {name for name, family in FAMILIES.items() if "tensorrt" in family.targets}
