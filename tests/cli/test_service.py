"""llmops.yaml: what may be in it, and that each command does what it says."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from llmops.build.spec import BuildSpec
from llmops.cli.main import cli
from llmops.cli.service.changes import engine_changes
from llmops.cli.service.command_defaults import default_quant
from llmops.cli.service.service_file import read, schema
from llmops.cli.service.template import cpu_template, default_model_name
from llmops.errors import InputError
from tests.support.commands import llmops

EXAMPLE = """
models:
  llama-70b:
    checkpoint: meta-llama/Llama-3.3-70B-Instruct
    build: {target: tensorrt, quant: fp8, gpu: h100-sxm, tp: 8}
    traffic: {qps: 10, isl: 3000, osl: 400, prefix_hit: 0.6}
    slo: {ttft_p95: 500ms, tpot_p95: 50ms}
    replicas: auto
gateway: {workers: 2, slo: {ttft_p95: 9s}, timeouts: {idle: 30s}}
profiles:
  laptop: {models: {llama-70b: {checkpoint: smollm2, build: {target: openvino, quant: int8}, replicas: 1}}}
  busy: {models: {small: {checkpoint: smollm2}}, gateway: {timeouts: {drain: 5s}, port: 9100}}
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "llmops.yaml"
    path.write_text(EXAMPLE)
    return path


def parameters(command: str, *arguments: str) -> dict:
    """Return the parameters that a command gets from these arguments, without running it."""
    with cli.get_command(None, command).make_context(command, list(arguments)) as context:
        return context.params


def test_a_profile_is_laid_over_the_file(file):
    plain, laptop, busy = read(file), read(file, "laptop"), read(file, "busy")
    assert plain.service.models["llama-70b"].build.tp == 8
    small = laptop.service.models["llama-70b"]
    # a build stands alone: eight GPUs are no part of what a laptop is to build
    assert small.build.model_dump(exclude_unset=True) == {"target": "openvino", "quant": "int8"}
    assert (small.checkpoint, small.replicas, small.traffic.isl) == ("smollm2", 1, 3000)
    assert (list(busy.service.models), busy.service.models["llama-70b"].build.tp) == (["llama-70b", "small"], 8)
    timeouts = busy.settings.timeouts
    assert (busy.settings.workers, busy.settings.port, timeouts.idle, timeouts.drain) == (2, 9100, 30, 5)


def test_the_gateway_gets_each_models_objectives(file):
    found = read(file, "busy").settings
    assert (found.slo_of("llama-70b").ttft_p95, found.slo_of("llama-70b").tpot_p95) == (0.5, 0.05)
    assert found.slo_of("small").ttft_p95 == 9.0


def test_the_environment_wins_over_the_file_and_flags_over_both(file, monkeypatch):
    monkeypatch.setenv("LLMOPS_WORKERS", "5")
    assert read(file).settings.workers == 5
    from llmops.gateway.settings import load_settings

    assert load_settings(read(file).layers, workers=7).workers == 7


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("modells: {}", r"`modells` .* did you mean `models`\?"),
        ("models: {a: {checkpoint: x, buildd: {}}}", r"`models\.a\.buildd` .* did you mean `build`\?"),
        ("models: {a: {checkpoint: x, build: {qant: fp8}}}", r"did you mean `quant`\?"),
        ("models: {a: {checkpoint: x, slo: {ttft: 1s}}}", r"did you mean `ttft_p9\d`\?"),
        ("models: {a: {checkpoint: x, slo: {ttft_p95: soon}}}", "'soon' is not a duration; write 500ms or 0.5s"),
        ("models: {a: {checkpoint: x}}\ngateway: {wrkers: 3}", r"`wrkers` .* did you mean `workers`\?"),
        ("models: {a: {checkpoint: x}}\ngateway: {models: {a: {slo: {tpot: 1}}}}", r"did you mean `tpot_p9\d`\?"),
        ("models: {a: {checkpoint: x}}\nprofiles: {p: {models: {a: {replica: 3}}}}", r"profile p.* `replicas`\?"),
        ("models: {a: {checkpoint: x, replicas: many}}", r"`models\.a\.replicas"),
        ("models: {}", "`models` .* it must not be empty"),
        ("- a", "must be a mapping with `models`"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, content, words):
    path = tmp_path / "llmops.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["profiles"]["busy"]["gateway"].update(workers="many"),
        lambda content: content["models"]["llama-70b"].update(replica=1),
        lambda content: content["models"]["llama-70b"]["build"].update(target="vllm"),
        lambda content: content["gateway"].update(wrkers=1),
        lambda content: content["profiles"]["laptop"]["models"]["llama-70b"].update(slow=1),
        lambda content: content.pop("models"),
    ],
)
def test_editors_know_the_file_by_its_schema(file, change):
    content, checker = yaml.safe_load(EXAMPLE), jsonschema.Draft202012Validator(schema())
    checker.check_schema(schema())
    assert checker.is_valid(content)
    change(content)
    assert not checker.is_valid(content)
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError):
        read(file)


def test_a_command_has_from_the_file_what_is_not_typed(file):
    planned = parameters("plan", "-f", str(file), "--isl", "77")
    assert planned["checkpoint"] == "meta-llama/Llama-3.3-70B-Instruct"
    assert (planned["gpu"], planned["tp"]) == ("h100-sxm", 8)
    assert (planned["isl"], planned["osl"], planned["qps"], planned["ttft_p95"]) == (77, 400, 10.0, 0.5)
    built = parameters("build", "-f", str(file), "--profile", "laptop", "--quant", "int4")
    assert (built["checkpoint"], built["target"], built["quant"], built["tp"]) == ("smollm2", "openvino", "int4", 1)
    assert (built["output"], built["name"]) == (file.parent / "engines" / "llama-70b", "llama-70b")
    loaded = parameters("bench", "-f", str(file), "-m", "llama-70b")
    assert (loaded["url"], loaded["rate"]) == ("http://127.0.0.1:9000/v1", 10.0)
    assert loaded["slo"] == ("ttft_p95:500ms", "tpot_p95:50ms")
    # 60 % of each prompt is what all have in common
    assert (loaded["input_"], loaded["prefix_tokens"], loaded["output"]) == ("1200", 1800, "400")
    made = parameters("repo", "-f", str(file), "--profile", "busy")
    assert made["engines"] == tuple(f"{name}={file.parent / 'engines' / name}" for name in ("llama-70b", "small"))
    up = parameters("up", "-f", str(file), "--profile", "busy", "--host", "0.0.0.0")
    assert (up["host"], up["port"]) == ("0.0.0.0", 9100)


@pytest.mark.parametrize(
    ("checkpoint", "pytorch", "tensorrt"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", "none", "none"), ("deepseek-ai/DeepSeek-V3.1", "none", "none"),
        ("openai/gpt-oss-120b", "none", "none"), ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "none", "none"),
        ("meta-llama/Llama-3.3-70B-Instruct", "fp8", "fp8"), ("smollm2", "fp8", "fp8"), ("no/such", "fp8", "fp8"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_comes_quantised_stays_as_it_is_where_no_format_is_named(checkpoint, pytorch, tensorrt):
    assert default_quant(checkpoint, "pytorch") == pytorch
    assert default_quant(checkpoint, "tensorrt") == tensorrt
    assert default_quant(checkpoint, "openvino") == "int8"


def test_a_command_runs_for_each_model_or_for_those_that_are_named(file):
    both = ["build", "-f", str(file), "--profile", "busy", "--dry-run"]
    assert re.findall(r"^writes up to .* to (.*)$", llmops(*both).output, re.M) == [
        str(file.parent / "engines" / name) for name in ("llama-70b", "small")
    ]
    one = llmops(*both, "--model", "small").output
    assert "smollm2: LlamaForCausalLM" in one
    assert "Llama-3.3" not in one
    missing = CliRunner().invoke(cli, [*both, "--model", "big"])
    assert missing.exit_code == 2
    assert "has no model 'big'; choose llama-70b or small." in missing.output


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=1))
def test_any_checkpoint_is_read_back_as_it_was_given(tmp_path_factory, checkpoint):
    path = tmp_path_factory.mktemp("init") / "llmops.yaml"
    name = default_model_name(checkpoint)
    BuildSpec(checkpoint=checkpoint, output=path, name=name)
    path.write_text(cpu_template(checkpoint, name), encoding="utf-8")
    assert {name: model.checkpoint for name, model in read(path).service.models.items()} == {name: checkpoint}


def test_init_writes_what_was_planned_and_never_over_a_file(tmp_path):
    file = tmp_path / "llmops.yaml"
    load = ["--qps", "10", "--isl", "3000", "--osl", "400", "--ttft-p95", "500ms", "--tpot-p95", "50ms"]
    build = ["--gpu", "h100", "--quant", "fp8", "-o", str(file)]
    command = ["init", "meta-llama/Llama-3.1-8B-Instruct", *load, *build]
    llmops(*command)
    (name, model), *others = read(file).service.models.items()
    assert (name, others) == ("llama-3.1-8b-instruct", [])
    assert (model.build.gpu, model.build.quant, model.traffic.qps) == ("h100-sxm", "fp8", 10)
    assert (model.slo.ttft_p95, model.slo.tpot_p95) == (0.5, 0.05)
    assert f"# planned: {model.replicas} x TP{model.build.tp} on" in file.read_text()
    assert read(file, "laptop").service.models[name].checkpoint == "smollm2"
    assert json.loads((tmp_path / "llmops.schema.json").read_text()) == schema()
    with pytest.raises(InputError, match="already exists"):
        llmops(*command)


def described(folder: Path, engine: Path, **build: object) -> Path:
    model = {"checkpoint": "smollm2", "build": {"quant": "none", "max_batch_size": 64, **build}}
    file = folder / "llmops.yaml"
    file.write_text(yaml.safe_dump({"models": {"smollm2": model}}))
    (folder / "engines").mkdir(exist_ok=True)
    if not (folder / "engines" / "smollm2").exists():
        (folder / "engines" / "smollm2").symlink_to(engine)
    return file


def test_diff_says_what_would_be_built_anew(tmp_path, engine_dir):
    assert list(engine_changes(read(described(tmp_path, engine_dir)))) == []
    changed = read(described(tmp_path, engine_dir, max_batch_size=128, quant="int8"))
    said = ["~ smollm2: quant none -> int8", "~ smollm2: max_batch_size 64 -> 128"]
    assert list(map(str, engine_changes(changed))) == said
    other = tmp_path / "llmops.yaml"
    other.write_text("models: {qwen: {checkpoint: Qwen/Qwen3-8B}}")
    said = [f"{sign} {name}: engine {tmp_path / 'engines' / name}" for sign, name in (("+", "qwen"), ("-", "smollm2"))]
    assert list(map(str, engine_changes(read(other)))) == said


def test_what_is_described_and_built_becomes_a_repository(tmp_path, engine_dir):
    from llmops.cli.stack import build_described

    repository, names = build_described(read(described(tmp_path, engine_dir, max_num_tokens=256)))
    assert list(names) == ["smollm2"]
    assert sorted(path.name for path in repository.glob("smollm2*")) == [
        "smollm2", "smollm2-postprocessing", "smollm2-preprocessing", "smollm2-tensorrt_llm",
    ]  # fmt: skip


def test_a_wrong_field_of_the_llm_api_in_the_file_is_one_sentence(tmp_path):
    path = tmp_path / "llmops.yaml"
    path.write_text("models: {a: {checkpoint: smollm2, build: {target: pytorch, set: {llm.kv_cache_confg: 1}}}}")
    with pytest.raises(InputError, match=r"llmops\.yaml, models\.a, and the options: .* no field kv_cache_confg"):
        llmops("build", "-f", path)
