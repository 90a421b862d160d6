"""Faults planted into deployments, each on a real Triton: `verify` must name them, and nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.perf.verify.findings import CheckOutcome
from llmops.perf.verify.run import VerifyOptions
from llmops.perf.verify.run import verify as verified
from tests.support.mock_engine.repository import make_mock_engine
from tests.support.tiny_models import TEMPLATE, export_quantised

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("own-triton"), pytest.mark.timeout(600)]


def renamed(engine: Path, **changes: Any) -> Path:
    """Changes fields of engine.json; the folder's name is the model's."""
    manifest = EngineManifest.load(engine)
    (engine / FILE_NAME).write_text(manifest.model_copy(update={"name": engine.name, "contents": {}, **changes}).text())
    return engine


def wrong_tokenizer(engine: Path) -> None:
    """Another model's: two letters have changed places."""
    path = engine / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    path.write_text(json.dumps(content))


def wrong_template(engine: Path) -> None:
    """The answer's beginning is missing."""
    (engine / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE.removesuffix("> "))


def swapped_ranks(exported: Path) -> None:
    ranks = [exported / f"rank{number}.safetensors" for number in (0, 1)]
    for old, new in ((ranks[0], exported / "away"), (ranks[1], ranks[0]), (exported / "away", ranks[1])):
        old.rename(new)


def wrong_scale(exported: Path) -> None:
    """The last layer's down projection is three times too large, on all ranks."""
    from safetensors.torch import load_file, save_file

    for path in exported.glob("rank*.safetensors"):
        tensors = load_file(path)
        tensors["transformer.layers.1.mlp.proj.weights_scaling_factor"] *= 3
        save_file(tensors, path)


def as_read(checkpoint: Path, exported: Path, folder: Path) -> Path:
    """The checkpoint that an engine of these rank files would compute, as a Hugging Face folder."""
    from safetensors.torch import save_file

    from llmops.build.quality.checkpoint_models import load_exported

    read = load_exported(exported, "tensorrt", open_checkpoint(str(checkpoint)))
    weights = {name: value.contiguous() for name, value in read.outer.items()}
    weights |= {name: table.rows(slice(None)).contiguous() for name, table in read.tables.items()}

    def keep(layer: dict[str, Any]) -> None:
        weights.update({name: value.clone() for name, value in layer.items()})

    list(read.log_probs([[1, 2, 3]], keep))
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    read.module.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A sound engine, one with each fault, and an FP8 one without any."""
    from llmops.build.quant_formats import FORMATS

    root = tmp_path_factory.mktemp("planted")
    found = [tiny_engine]
    for name, plant in {"tokenizer": wrong_tokenizer, "template": wrong_template}.items():
        shutil.copytree(tiny_engine, root / name)
        plant(root / name)
        found.append(renamed(root / name))
    source = open_checkpoint(str(tiny_checkpoint))
    export_quantised(source, root / "export", FORMATS["fp8"], "tensorrt", tp=2, size=8, seq_len=64)
    golden = EngineManifest.load(tiny_engine).golden
    plants: dict[str, Callable[[Path], None]] = {
        "fp8": lambda folder: None, "ranks": swapped_ranks, "scale": wrong_scale,
    }  # fmt: skip
    for name, plant in plants.items():
        exported = shutil.copytree(root / "export", root / f"export-{name}")
        plant(exported)
        build(BuildSpec(str(as_read(tiny_checkpoint, exported, root / f"read-{name}")), root / name, max_batch_size=8))
        quantisation = EngineManifest.load(root / name).quantisation.model_copy(update={"weights": "fp8"})
        found.append(renamed(root / name, golden=golden, quantisation=quantisation))
    return found


@pytest.fixture(scope="module")
def served(engines: list[Path], serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a Triton with all of them."""
    repository = tmp_path_factory.mktemp("served") / "repository"
    generate_repository(read_engines([str(engine) for engine in engines]), repository)
    return serve(repository)[1]


class Silent:
    """A Progress that shows nothing."""

    def begin(self, part: str, name: str) -> None: ...

    def result(self, result: CheckOutcome) -> None: ...


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("tiny", None),
        ("fp8", None),
        ("tokenizer", "answers, tokenizer: the tokenizer in "),
        ("template", "answers, chat template: the chat template makes another prompt of"),
        ("ranks", "answers, greedy answers: "),
        ("scale", "answers, greedy answers: "),
    ],
)
async def test_answers(served: str, model: str, fault: str | None) -> None:
    report, _ = await verified(VerifyOptions(triton=served, model=model, only=("answers",)), Silent())
    if fault is None:
        assert report.faults == []
        return
    assert any(sentence.startswith(fault) for sentence in report.faults), report.faults
    wrong = {one.name for one in report.results if one.fault}
    assert ("greedy answers" in wrong) == (model in ("ranks", "scale"))


GUIDES = {f"guided: {kind}" for kind in ("json", "json_schema", "regex", "ebnf_grammar")}
# in the engine model's package: (file, what it says, what the fault makes of it, what verify then finds wrong)
FAULTS = [
    ("runtimes/mock.py", "self._known.issuperset(word)", "False", {"end id", "stop words"}),
    # gauges whose reader has stopped
    ("runtimes/mock.py", "1024, active, 32", "1024, 7, 32", {"KV gauges"}),
    ("../llmops_contract.py", "_STEPS = 256", "_STEPS = 100_000", {"step stream: window"}),
    ("steps/subscription.py", "acknowledge(resume_from, now)", "acknowledge(0, now)", {"step stream: resume"}),
    ("tensor_parser.py", "if not capabilities.logit_bias:", "if False:", {"logit bias"}),
    (
        "../llmops_contract.py",
        'beam search", neutral=(1,)',
        'beam search", neutral=(1, 2)',
        {"refusals by tensor name"},
    ),
    ("loop.py", "if active.request_id == request_id:", "if False:", {"stop by request id"}),
    ("../llmops_contract.py", '"subscription: unknown"', '"not found"', {"step stream: unknown subscription"}),
]


def test_the_contract(verify, serve, engine_dir: Path, tmp_path: Path) -> None:
    """All at once: each must be found beside the others, and nothing else."""
    repository = make_mock_engine(engine_dir, tmp_path / "repository", 0.02)
    package = repository / "mock-tensorrt_llm" / "1" / "llmops_engine"
    wanted: set[str] = set()
    for name, old, new, found in FAULTS:
        text = (package / name).read_text()
        assert old in text, f"{name} no longer says {old!r}"
        (package / name).write_text(text.replace(old, new))
        wanted |= found
    report = verify(*serve(repository), "--only", "contract")
    assert (report.code, report.named("wrong")) == (1, wanted)
    assert report.named("unseen") == {"seeds", "penalties", "drawing"}
    assert report.named("refused") >= {"log-probabilities", "bad words", "adapters"} | GUIDES
    assert all(sentence.startswith("contract, ") for sentence in report.report["faults"])
    assert f"Fault: {report.report['faults'][0]}" in report.output
