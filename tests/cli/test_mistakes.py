"""Mistakes of a first day at the command line: one sentence with a way out, and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmops.connection_errors import http_status_error
from tests.support.forked_cli import run
from tests.support.tiny_models import write_config


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_a_path_that_is_too_long(command):
    result = run(command, "a" * 5000)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert result.stderr.startswith("Error: aaa")
    assert "cannot be used (File name too long); choose another path." in result.stderr


def test_clean_without_a_terminal_says_that_it_removed_nothing(tmp_path):
    engine = tmp_path / "up" / "engine"
    engine.mkdir(parents=True)
    (engine / "weights").write_bytes(b"x" * 5000)
    result = run("clean", "engines", env={"LLMOPS_CACHE": str(tmp_path)})
    assert result.returncode == 2
    assert result.stderr.endswith(
        "Error: Nothing more was removed, because standard input has no answer; give --yes to remove without asking.\n"
    )
    assert (engine / "weights").exists()


def test_a_wrong_setting_in_the_environment_says_where_it_is(tmp_path):
    result = run("gateway", env={"LLMOPS_PORT": "abc", "LLMOPS_CACHE": str(tmp_path)})
    said = "Error: The setting `port` (flags or environment) is not usable: it must be a whole number.\n"
    assert (result.returncode, result.stderr) == (2, said)


def test_a_model_that_is_not_served_is_no_wrong_url():
    error = http_status_error("http://a/v1", 404, "The model 'b' does not exist. GET /v1/models lists the models.")
    assert error.message.startswith("http://a/v1 does not serve that model")
    assert "check the URL" not in error.message


def test_up_of_a_misspelt_model_leaves_no_folder(tmp_path):
    result = run("up", "smolm2", env={"LLMOPS_CACHE": str(tmp_path)}, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith("; did you mean the bundled model smollm2?\n")
    assert not list(tmp_path.glob("up/*"))


NO_PORT = "does not fit; give a whole number of at least 0 and of at most 65535."
CLICK = {
    "bench --concurrency 0": "--concurrency is not usable: 0 does not fit; give a whole number of at least 1.",
    "bench --rate fast": "--rate is not usable: 'fast' does not fit; give a number above 0.",
    "bench --rate": "--rate needs a value; see `llmops bench --help`.",
    "bench --sweep=3": "--sweep takes no value; leave it out.",
    "bench --timeout 5": "--timeout is not usable: 5 has no unit; write 5ms or 5s.",
    "plan x --prefix-hit 1": "--prefix-hit is not usable: 1.0 does not fit; give a number of at least 0 and below 1.",
    "plan": "CHECKPOINT is missing; write `llmops plan [OPTIONS] CHECKPOINT`.",
    "plan a b": "b is not expected here; see `llmops plan --help`.",
    "plan a --gpuz 8": "There is no option --gpuz; did you mean --gpu or --gpus?",
    "doctor --fix": "There is no option --fix; see `llmops doctor --help`.",
    "repo x": "--output is missing; write --output PATH.",
    "build smollm2 -o x --adapter lora": (
        "--adapter is not usable: 'lora' is not NAME=FOLDER; write for example support=lora."
    ),
    "build smollm2 -o x --set foo=1": "--target openvino has no setting --set foo; leave it out.",
    "build smollm2 -o x --adapter a=b": "--target openvino has no --adapter; leave it out.",
    "build smollm2 -o x --calib-seed 1": "--target openvino has no --calib-seed; leave it out.",
    "build smollm2 -o x --quant int8 --calib-data nothere.txt": (
        "--target openvino quantises without calibration; leave out --calib-data."
    ),
    "plan Qwen/Qwen2.5-7B-Instruct --gpus 1 --tp 3": (
        "--tp 3 x --pp 1 needs 3 GPUs, but --gpus is 1; raise --gpus, or lower --tp or --pp."
    ),
    "build x --target cpu": "--target is not usable: cpu is none of its values; choose openvino, tensorrt or pytorch.",
    "verify --engine none": "--engine is not usable: none does not exist; name an existing path.",
    "verify --engine file": "--engine is not usable: file is a file; name a folder.",
    "simulate --plan . --rate 1": "--plan is not usable: . is a folder; name a file.",
    "key lst": "There is no command lst; see `llmops key --help`.",
    "key update key-1": "Nothing to change; give an option, e.g. --rpm 120.",
    "up engine --quant int4 --tp 2": "engine is an engine that was built already; leave --quant, --tp out.",
    "serve x --claim a": "Only files of --export contain this; leave --claim out.",
    "serve x --no-metrics --metrics-port 1": (
        "--no-metrics leaves Triton's metrics server off; leave --metrics-port out."
    ),
    "serve x --export lws --restarts 3": (
        "The cluster watches what --export describes, not this command; leave --restarts out."
    ),
    "serve x --export slurm --claim a": "A Slurm script mounts folders, not a claim; leave --claim out.",
    "chart --schema-only --claim a": "--schema-only writes a schema that fits all values; leave --claim out.",
    "usage --tenant a dead-letters": "The options of dead-letters follow its name; leave --tenant out.",
    "plan x --name a": "Only --rules writes a name; leave --name out.",
    "plan x --acceptance 0.5": "Without --draft-tokens no token is proposed; leave --acceptance out.",
    "build x -o y --in-container": "Only --resume runs a step in a container; leave --in-container out.",
    "bench --arrival constant": "Only --rate and --sweep choose the time between requests; leave --arrival out.",
    "bench --fail-under 0.9": "Without --slo no request has an objective; leave --fail-under out.",
    "simulate --plan file --trace file --turns 3": "A replay has its own times and lengths; leave --turns out.",
    "simulate --plan file --herd 5 --duration 5m": "Clients of --herd alone send one request each; leave -d out.",
    "srve": "There is no command `srve`; did you mean `llmops serve`?",
    "upp": "There is no command `upp`; did you mean `llmops up`?",
    "init service.yaml": "service.yaml names the file to write, not a checkpoint; write -o service.yaml.",
    "build https://huggingface.co/a/b -o e": (
        "https://huggingface.co/a/b is a URL, which is not downloaded; give the hub id, here perhaps a/b."
    ),
    "build --resume nothere": "nothere is not an engine folder (no engine.json). Make one with `llmops build`.",
    "bench --extra {a": (
        "--extra {a is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); write a "
        "JSON object in single quotes, such as --extra '{\"top_k\": 20}'."
    ),
    "safety test typo.jsonl --config gateway.yaml": (
        "typo.jsonl, line 1 has the unknown field 'categry'; did you mean 'category'?"
    ),
    "safety train few.jsonl --url http://a --model m -o h": (
        "Too few examples of clean texts: 1, where at least 8 are needed; add more."
    ),
    "serve x --http-port 99999": f"--http-port is not usable: 99999 {NO_PORT}",
    "serve x --grpc-port -1": f"--grpc-port is not usable: -1 {NO_PORT}",
}
FILES = {
    "file": "", "engine/engine.json": "", "typo.jsonl": '{"text": "a", "categry": "s"}', "few.jsonl": '{"text": "a"}',
    "gateway.yaml": "safety: {filters: {s: {kind: rules, words: [a]}}}",
}  # fmt: skip


@pytest.mark.parametrize("typed", CLICK)
def test_a_wrong_command_line_gets_one_sentence_and_writes_nothing(tmp_path, typed):
    (tmp_path / "engine").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    result = run(*typed.split(), cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"Error: {CLICK[typed]}\n")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*FILES}


UNUSABLE = "The setting `{}` (flags, environment or gateway.yaml) is not usable:"
SETTINGS = {
    "safety: {filters: {s: {kind: rules}}}": (
        "The safety filter s has neither patterns nor words; give it `patterns`, `words` or `words_file`."
    ),
    "safety: {filters: {s: {kind: rules, patterns: ['a(b']}}}": (
        "The safety filter s has a pattern that does not compile: 'a(b' (missing ), unterminated subpattern at "
        "position 1); write \\ before a character that is meant literally."
    ),
    "safety: {filters: {s: {kind: rules, words_file: nothere}}}": (
        "The word list nothere cannot be read (No such file or directory); correct `words_file`."
    ),
    "safety: {filters: {s: {kind: model, head: nothere}}}": (
        "The safety head nothere cannot be read (No such file or directory); make one with `llmops safety train`."
    ),
    "safety: {filters: {s: {kind: http, url: 'https://a/v1/moderations', key_env: NOT_SET}}}": (
        "The safety filter s needs a key in the environment variable NOT_SET; set this variable."
    ),
    "safety: {filters: {s: {kind: rulez}}}": (
        f"{UNUSABLE.format('safety.filters.s')} its 'kind' must be one of 'rules', 'language', 'model', 'http', not "
        "'rulez'."
    ),
    "safety: {filters: {s: {words: [a]}}}": f"{UNUSABLE.format('safety.filters.s')} it needs a 'kind'.",
    "safety: {filters: {secrets: {kind: rules, words: [a]}}, policy: {prompt: [secretz]}}": (
        f"{UNUSABLE.format('safety')} a policy names the filter secretz, which is not in `filters`; describe it there."
    ),
    "aliases: {gpt-4: smart}": f"{UNUSABLE.format('aliases.gpt-4')} it must be a list.",
    "aliases: {gpt-4: [smart], smart: [smollm2]}": (
        f"{UNUSABLE.format('aliases')} the alias gpt-4 names the alias smart; name models instead."
    ),
    "aliases: {smollm2: [smollm2]}": (
        f"{UNUSABLE.format('aliases')} the alias smollm2 has the name of its own model; choose another name for it."
    ),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_wrong_settings_end_the_gateway_before_it_says_that_it_listens(tmp_path, settings):
    (tmp_path / "gateway.yaml").write_text(settings)
    result = run("gateway", "--config", "gateway.yaml", "--port", "0", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"Error: {SETTINGS[settings]}\n")


# -- Tests of every command with wrong paths, a full disk and Ctrl-C


LLMOPS = [sys.executable, "-m", "llmops.cli"]


def llmops(*arguments: object, **given) -> subprocess.CompletedProcess[str]:
    command = [*LLMOPS, *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False, **given)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_config(tmp_path / "checkpoint", "llama")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("up", "smollm2", "--dir", "{file}/x"),
            "cannot be written (Not a directory); choose another folder with --dir.",
        ),
        (("up", "smollm2", "--target", "tensorrt", "--dir", "{new}"), "need TensorRT-LLM, which is not installed here"),
        (("repo", "{engine}", "-o", "{file}/x"), "/file/x cannot be written ("),
        (("serve", "{engine}"), "is an engine, not a model repository: `llmops repo "),
        (("build", "{checkpoint}", "-o", "{other}", "--dry-run"), "is not an engine"),
        (("build", "--resume", "{other}", "--quant", "int4"), "leave --quant out"),
        (("build", "smollm2", "--resume", "{other}", "-o", "{new}"), "was begun; leave CHECKPOINT, -o out."),
        (("bench", "--compare", "a.json", "b.json", "-n", 5), "sends no load; leave -n out."),
    ],
)
def test_wrong_places_are_one_sentence(engine_dir, checkpoint, tmp_path, arguments, said):
    places = {name: tmp_path / name for name in ("file", "other", "new")}
    places["file"].touch()
    places["other"].mkdir()
    (places["other"] / "mine.txt").touch()
    filled = [str(part).format(engine=engine_dir, checkpoint=checkpoint, **places) for part in arguments]
    result = run(*filled)
    assert result.returncode in (1, 2)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not places["new"].exists()


@pytest.mark.parametrize("file", [".", "config.json"])
def test_a_dry_run_in_json(checkpoint, tmp_path, file):
    result = run("build", checkpoint / file, "-o", tmp_path / "e", "--dry-run", "--json")
    plan = json.loads(result.stdout)
    # by hand: embedding and head, and per layer q, o, k, v, gate, up, down and two norms; the last norm
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256
    assert plan["parameters"] == 2 * 512 * 256 + 2 * layer + 256
    assert (plan["architecture"], plan["target"], plan["tp"]) == ("LlamaForCausalLM", "openvino", 1)


@pytest.mark.parametrize("arguments", [("--help",), ("build", "{checkpoint}", "-o", "{new}", "--dry-run")])
def test_output_that_cannot_be_written(checkpoint, tmp_path, arguments):
    filled = [part.format(checkpoint=checkpoint, new=tmp_path / "new") for part in arguments]
    with open("/dev/full", "w") as full:
        result = llmops(*filled, stdout=full)
    said = (
        "Error: Standard output cannot be written (No space left on device); free disk space, or redirect the output."
    )
    assert (result.returncode, result.stderr) == (1, f"{said}\n")


def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)
    result = llmops("--help", stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_help_imports_nothing_heavy():
    script = "import sys; sys.argv = ['llmops', '--help']\nfrom llmops.cli.main import main\ntry: main()\n"
    script += "except SystemExit: print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    said = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=300)
    loaded = set(said.rpartition("loaded:")[2].split())
    assert "click" in loaded
    heavy = "numpy torch transformers openvino grpc google fastapi starlette uvicorn pydantic rich httpx jinja2"
    assert not loaded & {*heavy.split(), "tokenizers"}
