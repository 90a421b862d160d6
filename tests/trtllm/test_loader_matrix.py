"""Family x weights x KV cache x target: what `build` accepts is exported from a tiny random model and holds what
TensorRT-LLM loads, by name, shape, dtype and value; what it refuses names the alternatives.

The rules are data with their sources: `required.py` for engines (1.2.1), `hf_required.py` for the PyTorch backend. By
default cells that cover every pair of family, weights and cache; `make matrix` runs all of them and writes the table of
docs/tensorrt-llm.md. Where `tensorrt_llm` is installed its own classes load the same files (test_the_real_loader).
"""

import functools
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.model.families import FAMILIES
from llmops.build.quant_formats import FORMATS, buildable_formats, format_of, removal_reason
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TARGETS
from llmops.build.targets.build_target import get_target
from llmops.build.trtllm.container_images import OWN_TAG
from llmops.build.trtllm.unsupported_checkpoints import UNSUPPORTED_CHECKPOINTS
from llmops.errors import LlmopsError
from tests.support import tiny_models as models
from tests.trtllm import hf_required, required

pytest.importorskip("modelopt")


HERE = Path(__file__).parent
DOC = HERE.parents[1] / "docs" / "tensorrt-llm.md"

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
EXPERTS = 4
KV_ALGORITHM = {"auto": None, "fp8": "FP8", "int8": "INT8"}
PUBLISHED = models.PUBLISHED
EVERY = bool(os.environ.get("LLMOPS_EVERY_CELL"))


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """`sources(family)`: a tiny checkpoint; of families that are only passed on, their config.json alone."""

    @functools.cache
    def get(family):
        folder = tmp_path_factory.mktemp(family)
        if family in PUBLISHED:
            return open_checkpoint(str(models.write_config(folder, family)), weights=False)
        experts = {"moe_intermediate_size": 256} if family == "qwen3_moe" else {}
        return open_checkpoint(str(models.write_checkpoint(folder, family, **SMALL, **experts)))

    return get


def refusal(source, target, quant, kv, **options):
    """Return the message with which `build` rejects the combination before any work, or None."""
    options |= dtype_of(source.architecture.moe, target, quant)
    if FAMILIES[source.architecture.family].since > (1, 2):
        options |= {"image": OWN_TAG}
    try:
        spec = BuildSpec("c", Path("e"), target, "tiny", quant, kv, options=options)
        get_target(target).prepare(spec, source)
    except LlmopsError as error:
        return error.message
    return None


def dtype_of(moe, target, quant):
    """The settings of a cell: on Hopper experts in W4A8 are computed right in bfloat16 only."""
    return {"dtype": "bfloat16"} if moe and (target, quant) == ("pytorch", "w4a8_awq") else {}


def offered(target):
    """family, weights, KV cache: every combination that a user can write down for a target."""
    families = [name for name, family in FAMILIES.items() if target in family.targets]
    return list(itertools.product(families, buildable_formats(target), TARGETS[target].kv_caches))


def accepted(target):
    """The cells of `offered` that `allowed_formats` allows and that are exported. Without a checkpoint, because these
    are parameters of tests; test_what_is_refused holds `build` to the same."""
    from llmops.build.targets.nvidia.build_request import allowed_formats

    return [(family, quant, kv) for family, quant, kv in offered(target)
            if family not in PUBLISHED and quant in allowed_formats(family, target)]  # fmt: skip


def pairwise(cells):
    """The fewest cells, greedily, that hold every pair of family, weights and cache that occurs in `cells`."""

    def pairs(cell):
        return {(i, j, cell[i], cell[j]) for i, j in ((0, 1), (0, 2), (1, 2))}

    missing, chosen = set().union(*map(pairs, cells)), []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen)


ENGINES, CHECKPOINTS = (accepted(target) if EVERY else pairwise(accepted(target)) for target in ("tensorrt", "pytorch"))
# and other layouts: one GPU, more GPUs than KV heads, pipeline stages, which engines of Phi-3 have not
LAYOUTS = [(family, tp, pp) for family in required.KINDS for tp, pp in ((1, 1), (4, 1), (2, 2))
           if (family, pp) != ("phi3", 2)]  # fmt: skip


@pytest.fixture
def export(sources, tmp_path):
    def run(family, quant, kv="auto", tp=2, target="tensorrt", form=None, **more):
        how = {"tp": tp, "kv": kv, "group": group_of(quant, tp), "size": 1, "seq_len": 8, **more}
        folder = tmp_path / "c"
        models.export_quantised(sources(family), folder, form or format_of(quant, target), target, **how)
        return folder

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


def check_ranks(folder, family, quant, kv, tp, pp):
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    algorithm = FORMATS[quant].algorithm
    algorithms = [config["quantization"][name] for name in ("quant_algo", "kv_cache_quant_algo")]
    assert (algorithms, config["logits_dtype"]) == ([algorithm, KV_ALGORITHM[kv]], "float32")
    for rank in range(tp * pp):
        wanted = required.required(family, sizes_of(family, quant, tp), algorithm, KV_ALGORITHM[kv], tp, pp, rank)
        with safe_open(folder / f"rank{rank}.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            assert str(tensor.dtype).removeprefix("torch.") in required.dtypes(name, algorithm, config["dtype"]), name
            if name.endswith(required.SCALES):
                assert (tensor.float().isfinite() & (tensor.float() > 0)).all(), name
            if name.endswith("prequant_scaling_factor") and tensor.dim() == 2:
                assert (tensor == tensor[0]).all(), name  # preprocess_weights takes the first expert's for all
        # the two halves of kv_cache_scaling_factor, which preprocess_weights would join
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()
                 if ".k_cache_" not in name and ".v_cache_" not in name}  # fmt: skip
        assert found == wanted, (rank, sorted(found.items() ^ wanted.items()))


@pytest.mark.parametrize(("family", "quant", "kv"), ENGINES)
def test_an_engine_checkpoint_has_what_trtllm_build_loads(export, family, quant, kv):
    check_ranks(export(family, quant, kv), family, quant, kv, 2, 1)


@pytest.mark.parametrize(("family", "tp", "pp"), LAYOUTS)
def test_each_layout_has_what_the_engine_loads(export, family, tp, pp):
    check_ranks(export(family, "fp8", "fp8", tp, pp=pp), family, "fp8", "fp8", tp, pp)


def stored(folder):
    """(config.json, hf_quant_config.json's `quantization` or None, the tensors by name)."""
    from safetensors.torch import load_file

    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    quantised = folder / "hf_quant_config.json"
    found = {name: hf_required.Stored(tuple(one.shape), str(one.dtype).removeprefix("torch."), one)
             for name, one in tensors.items()}  # fmt: skip
    quantisation = json.loads(quantised.read_text())["quantization"] if quantised.is_file() else None
    return json.loads((folder / "config.json").read_text()), quantisation, found


@pytest.mark.parametrize(("family", "quant", "kv"), CHECKPOINTS)
def test_a_checkpoint_has_what_the_pytorch_backend_loads(sources, export, tmp_path, family, quant, kv):
    if quant == "none":
        from llmops.build.progress import SilentProgress

        (tmp_path / "tokenizer").mkdir()
        spec = BuildSpec("c", tmp_path / "e", "pytorch", "tiny", quant, kv)
        get_target("pytorch").prepare(spec, sources(family)).build(tmp_path, SilentProgress())
        folder, tps = tmp_path / "model", (1, 2)
    else:
        dtype = dtype_of(sources(family).architecture.moe, "pytorch", quant).get("dtype")
        folder = export(family, quant, kv, tp=1, dtype=dtype, target="pytorch")
        tps = (1,) if FORMATS[quant].grouped else (1, 2)  # groups of 128 inputs do not divide by 2 here
    config, quantisation, tensors = stored(folder)
    assert (quantisation or {}).get("quant_algo") == FORMATS[quant].algorithm
    assert (quantisation or {}).get("kv_cache_quant_algo") == (KV_ALGORITHM[kv] if quant != "none" else None)
    for tp in tps:
        assert hf_required.faults(family, config, quantisation, tensors, tp) == []


REFUSED = [
    (family, quant)
    for row in UNSUPPORTED_CHECKPOINTS
    for family in sorted(row.families - set(PUBLISHED))
    for quant, form in buildable_formats("pytorch").items()
    if form.algorithm in row.algorithms
]


@pytest.mark.parametrize(("family", "quant"), REFUSED)
def test_what_the_loader_rejects_is_refused_and_would_not_load(sources, export, family, quant):
    said = refusal(sources(family), "pytorch", quant, "auto")
    assert said is not None
    assert "; use none, fp8" in said
    folder = export(family, quant, tp=1, target="pytorch", form=FORMATS[quant])
    assert hf_required.faults(family, *stored(folder), tp=1)


@pytest.mark.parametrize("target", ["tensorrt", "pytorch"])
def test_build_accepts_what_the_table_says_and_names_what_it_takes_instead(sources, target):
    cells = {cell: refusal(sources(cell[0]), target, cell[1], cell[2]) for cell in offered(target)}
    allowed = set(accepted(target)) | {(family, "none", "auto") for family in PUBLISHED if target == "pytorch"}
    taken = {cell for cell, said in cells.items() if said is None}
    assert allowed <= taken
    assert {family for family, _, _ in taken - allowed} <= set(PUBLISHED)
    for said in filter(None, cells.values()):
        assert "; use " in said or "leave out" in said, said


def test_a_family_of_a_later_release_gets_its_image(sources):
    spec = BuildSpec("c", Path("e"), "pytorch", "tiny", "none")
    assert get_target("pytorch").prepare(spec, sources("minimax_m2")).request.image.tag == "trtllm-1.3"
    spec = replace(spec, options={"tensorrt_llm": "1.2.1"})
    with pytest.raises(LlmopsError, match=r"1\.2\.1 does not have MiniMaxM2ForCausalLM; use --set image=trtllm-1\.3"):
        get_target("pytorch").prepare(spec, sources("minimax_m2"))


def marks(sources, target, minor):
    """family -> format -> what a user can have there."""
    table = {}
    for family, quant, kv in offered(target):
        said = refusal(sources(family), target, quant, kv)
        takes = said is None and removal_reason(quant, minor) is None
        table.setdefault(family, {}).setdefault(quant, []).extend([kv] if takes else [])
    for family, row in table.items():
        for quant, caches in row.items():
            whole = len(caches) == len(TARGETS[target].kv_caches)
            published = "published" if FAMILIES[family].since == (1, 2) else "published (1.3)"
            kind = published if family in PUBLISHED else "yes" if whole else " ".join(caches)
            row[quant] = kind if caches else "–"
    return table


def rendered(sources):
    """The tables of docs/tensorrt-llm.md."""
    lines = []
    for title, target, minors in (
        ("`tensorrt`, TensorRT-LLM 1.2.1", "tensorrt", [(1, 2)]),
        ("`pytorch`, TensorRT-LLM 1.2.1 and 1.3.0rc29", "pytorch", [(1, 2), (1, 3)]),
    ):
        table, *later = (marks(sources, target, minor) for minor in minors)
        for family, row in table.items():
            for quant, mark in row.items():
                others = {one[family][quant] for one in later} - {mark}
                assert others <= {"–"}, f"{family} {quant}: {mark} became {others}"
                row[quant] = f"{mark} (1.2)" if others else mark
        formats = list(buildable_formats(target))
        lines += [f"| {title} | {' | '.join(formats)} |", "|---" * (len(formats) + 1) + "|"]
        alike: dict[tuple[str, ...], list[str]] = {}
        for family, row in table.items():
            alike.setdefault(tuple(row[quant] for quant in formats), []).append(family)
        lines += [f"| {', '.join(families)} | {' | '.join(row)} |" for row, families in alike.items()]
        lines.append("")
    lines.append("TensorRT-LLM 1.4.0rc1: not checked. Its linear layers moved to files that were not read.")
    return "\n".join(lines)


BEGIN, END = "<!-- written by make matrix -->\n", "\n<!-- end -->"


def test_the_documented_table(sources):
    """Last in the file: with LLMOPS_WRITE_MATRIX the whole run before it is what the table reports."""
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    if os.environ.get("LLMOPS_WRITE_MATRIX"):
        DOC.write_text(f"{before}{BEGIN}{rendered(sources)}{END}{after}")
    else:
        assert table == rendered(sources)
