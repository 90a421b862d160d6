"""`llmops plan` as a user runs it."""

import json
import re

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from llmops.build.plan.build_plan import BuildPlan
from llmops.cli.plan import command
from llmops.errors import CheckpointError, InputError, LlmopsError, ResourceError
from tests.support.commands import llmops
from tests.support.pages import Page, PageServer

TASK = ["--quant", "fp8", "--isl", "3000", "--osl", "400", "--qps", "5", "--ttft-p95", "500ms", "--tpot-p95", "50ms"]

WANTED = """h100-sxm|TTFT|TPOT|weights: mlp|KV cache|activations|CUDA graphs|communication|sequences
without paging|per million tokens|cheaper above|max_batch_size|tokens/s per user|Rejected
roofline (h100-sxm)""".replace("\n", "|").split("|")


@pytest.fixture
def config(models, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(models.LLAMA31_70B_CONFIG))
    return path


def run(*arguments, width: int = 80):
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(command, [*map(str, arguments), "--timing", "roofline"])
    if isinstance(result.exception, LlmopsError):
        raise result.exception
    return result


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal_and_answers_the_questions(config, width):
    result = run(config, *TASK, "--price", "h100-sxm=2.5", "--api-price", "0.6,0.9", "--gpus", "12", width=width)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= width
    flat = re.sub(r"[\s│]+", " ", result.stdout)
    for words in WANTED:
        assert words in flat, words


def test_json_has_every_figure_and_adds_up(config):
    data = json.loads(run(config, *TASK, "--json").stdout)
    best = data["candidates"][0]
    memory = best["memory"]
    fixed = sum(memory[name] for name in ("activations", "cuda_graphs", "communication", "runtime", "kv_cache", "left"))
    assert sum(memory["weights"].values()) + fixed == memory["total"]
    assert best["point"]["tpot_p95"] <= 0.05
    assert best["capacity_requests_per_second"] >= 5
    assert best["cost"]["hourly"] == pytest.approx(2.99 * best["gpus"])
    built = next(one for one in data["candidates"] if one["kind"] == "aggregated")
    assert BuildPlan.from_dict(data).tp_size == built["layout"]["tp"]


def test_a_ranking_without_targets_says_that_it_goes_by_cost(config):
    assert "No latency targets were given" in json.loads(run(config, "--json").stdout)["caution"]
    assert json.loads(run(config, "--json", "--tpot-p95", "100ms").stdout)["caution"] is None


def test_markup_in_a_name_is_escaped(models, tmp_path):
    folder = tmp_path / "<b>&[red]"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(models.LLAMA31_70B_CONFIG))
    page = tmp_path / "report.html"
    result = run(folder, *TASK, "--html", page)
    assert "<b>&[red]" in result.stdout.replace("\n", "")
    assert "<b>" not in page.read_text()


def test_a_name_of_a_stranger_is_escaped(models, tmp_path):
    """Before the fix, the terminal obeyed the name that a config.json was saved with."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**models.LLAMA31_70B_CONFIG, "_name_or_path": "a\x1b]0;owned\x07\nNot a line"}))
    said = run(path, *TASK, "--html", tmp_path / "page.html").stdout
    for text in (said, (tmp_path / "page.html").read_text()):
        assert "\x1b" not in text
        assert "\nNot a line" not in text


def test_the_saved_plan_is_what_was_shown(config, tmp_path):
    path = tmp_path / "plan.json"
    shown = run(config, *TASK, "--save", path).stdout
    saved = BuildPlan.load(path)
    assert f"TP{saved.tp_size}" in shown
    assert f"max_batch_size {saved.max_batch_size}" in re.sub(r"[\s│]+", " ", shown)
    assert saved.quantisation == saved.kv_cache_dtype == "fp8"
    assert BuildPlan.from_dict(saved.to_dict()) == saved


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h1000-sxm"], "The GPU 'h1000-sxm' is unknown; choose one of h100-sxm.*Did you mean h100-sxm"),
        (["--gpu", "h100", "--compare", "h100,h200"], "exclude each other"),
        (["--price", "b200-sxm=3"], "the plan does not use b200-sxm"),
        (["--price", "h100-sxm=cheap"], "write the dollars per hour"),
        (["--price", "h100-sxm=-1"], "write the dollars per hour"),
        (["--api-price", "1"], "per million input and output"),
        (["--api-price", "0,0"], "not both zero"),
        (["--quant", "fp5"], "The quantisation 'fp5' is unknown; choose one of auto, bf16, fp8"),
        (["--kv-dtype", "fp4"], "The KV cache dtype 'fp4' is unknown"),
        (["--timing", "guess"], "--timing 'guess' is unknown"),
        (["--tp", "8", "--gpus", "4"], "needs 8 GPUs, but --gpus is 4"),
        (["--tpot-p95", "1ms"], "No layout meets the latency targets"),
        (["--html", "/nowhere/at/all.html"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(config, arguments, words):
    result = CliRunner().invoke(command, [str(config), "--timing", "roofline", *arguments])
    assert isinstance(result.exception, InputError), result.output
    assert result.exception.exit_code == 2
    assert re.search(words, result.exception.message)
    assert "\n" not in result.exception.message


@pytest.mark.parametrize("value", ["fast", "-5ms", "5 minutes"])
def test_a_duration_that_is_none(config, value):
    result = CliRunner().invoke(command, [str(config), f"--ttft-p95={value}"])
    assert result.exit_code == 2
    assert "is not a duration" in result.output


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"does not exist; name a config\.json"):
        run(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        run(tmp_path)


@pytest.fixture
def no_proxy(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_hub_id_without_a_network(monkeypatch, no_proxy):
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with pytest.raises(CheckpointError, match=r"not among the \d+ models .* give --online to ask the Hugging Face hub"):
        run("nobody/nothing")
    with pytest.raises(ResourceError, match="cannot be reached"):
        run("nobody/nothing", "--online")
    with pytest.raises(ResourceError, match="cannot be reached"):
        run("meta-llama/Llama-3.3-70B-Instruct", "--online")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "is gated: accept its licence"),
        (404, "RepoNotFound", r"nor a model on .*; did you mean openai/gpt-oss-20b"),
    ],
)
def test_what_the_hub_refuses(monkeypatch, no_proxy, status, code, words):
    with PageServer(lambda _: Page("", status, {"X-Error-Code": code})) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # tests/build sets it for the whole process
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        with pytest.raises(CheckpointError, match=words):
            run("opena/gpt-oss-20b", "--online")


def test_a_model_by_its_hub_id_needs_nothing_but_the_id():
    shown = run("META-LLAMA/Llama-3.3-70B-Instruct", "--quant", "fp8", "--timing", "roofline", "--tp", "8", width=120)
    assert shown.stdout.startswith("meta-llama/Llama-3.3-70B-Instruct · fp8 weights")


def test_an_embedding_model_is_named_as_one():
    with pytest.raises(CheckpointError, match=r"BAAI/bge-m3 is an embedding model \(XLMRobertaModel, 567 million"):
        run("baai/bge-m3")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"architectures": ["BertModel"]}', "BertModel is an embedding model"),
        ('{"architectures": ["LlamaForCausalLM"]}', "has no `"),
    ],
)
def test_a_config_that_is_none(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=words):
        run(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is not JSON"), ("{}", "is not a build plan"), ('{"format": 1, "tp_size": 0}', "is not a build plan")],
)
def test_a_file_that_is_no_plan(tmp_path, content, words):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        BuildPlan.load(path)
    with pytest.raises(InputError, match="does not exist"):
        BuildPlan.load(tmp_path / "other.json")


@pytest.mark.parametrize(("field", "words"), [("quantisation", "the format is unknown"), ("kv_cache_dtype", "int8")])
def test_a_plan_of_unknown_formats(tmp_path, field, words):
    """Before the fix, `simulate --plan` ended in a KeyError."""
    run("smollm2", "--gpu", "h100-sxm", "--save", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    with pytest.raises(InputError, match=f"is not a build plan .{field}: .*{words}"):
        BuildPlan.from_dict({**plan, field: "fp9"})


def test_the_bundled_model_is_planned_from_its_gguf():
    """SmolLM2-135M: 30 layers, 9 query and 3 KV heads of 64, hidden 576, MLP 1536, 49,152 tokens, one table."""
    result = run("smollm2", "--gpu", "h100-sxm", "--json")
    weights = json.loads(result.stdout)["candidates"][0]["memory"]["weights"]
    assert weights["attention"] == 30 * 2 * (2 * 576 * 576 + 2 * 576 * 192)
    assert (weights["mlp"], weights["embedding"]) == (30 * 2 * 3 * 576 * 1536, 2 * 49152 * 576)
    assert "lm_head" not in weights


@pytest.mark.parametrize(
    ("model", "quant"), [("meta-llama/Llama-3.3-70B-Instruct", "fp8"), ("mistralai/Mixtral-8x7B-Instruct-v0.1", "fp8")]
)
def test_the_first_recommendation_is_what_build_takes(tmp_path, model, quant):
    """`build --dry-run --plan` accepts the recommendation on the command line."""
    plan = tmp_path / "plan.json"
    run(model, "--quant", quant, "--qps", "5", "--tpot-p95", "50ms", "--save", plan)
    built = llmops("build", "--dry-run", model, "--plan", plan, "-o", tmp_path / "engine")
    layout = json.loads(plan.read_text())
    assert f"tp {layout['tp_size']}, pp {layout['pp_size']}" in built.output
