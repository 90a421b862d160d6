"""Tests of every command with wrong paths, a full disk and Ctrl-C.

The command prints one sentence and exits with the right code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LLMOPS = [sys.executable, "-m", "llmops.cli"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


def llmops(*arguments: object, **given) -> subprocess.CompletedProcess[str]:
    command = [*LLMOPS, *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False, **given)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("ports", [("--http-port", 99999), ("--grpc-port", -1)])
def test_serve_takes_only_ports_and_times_that_there_are(tmp_path, ports):
    result = llmops("serve", tmp_path, *ports)
    assert result.returncode == 2
    assert result.stderr.startswith(
        f"Error: {ports[0]} is not usable: {ports[1]} does not fit; give a whole number of at least "
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up", "smollm2", "--dir", "{file}/x"), "cannot be written (Not a directory); give --dir another folder."),
        (("up", "smollm2", "--target", "pytorch", "--dir", "{new}"), "need TensorRT-LLM, which is not installed here"),
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
    result = llmops(*filled)
    assert result.returncode in (1, 2)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not places["new"].exists()


@pytest.mark.parametrize("file", [".", "config.json"])
def test_a_dry_run_in_json(checkpoint, tmp_path, file):
    result = llmops("build", checkpoint / file, "-o", tmp_path / "e", "--dry-run", "--json", stdout=subprocess.PIPE)
    plan = json.loads(result.stdout)
    # by hand: embedding and head, and per layer q, o, k, v, gate, up, down and two norms; the last norm
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256
    assert plan["parameters"] == 2 * 512 * 256 + 2 * layer + 256
    assert (plan["architecture"], plan["target"], plan["tp"]) == ("LlamaForCausalLM", "openvino", 1)


def test_a_file_of_a_kind_that_is_not_known_is_not_looked_for_on_the_hub(checkpoint, tmp_path):
    pytest.importorskip("modelopt")
    (tmp_path / "corpus.text").write_text("Once upon a time.")
    command = ["build", checkpoint, "-o", tmp_path / "e", "--target", "pytorch", "--quant", "fp8", "--dry-run"]
    # a hub that answered at all would be a failure: no server listens there
    nowhere = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1"}
    result = llmops(*command, "--calib-data", tmp_path / "corpus.text", env=nowhere)
    assert result.returncode == 2
    assert "is of no kind that can be read; give a .jsonl, .txt or .parquet file." in result.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("build", "{checkpoint}", "-o", "{new}", "--dry-run")])
def test_output_that_cannot_be_written(checkpoint, tmp_path, arguments):
    filled = [part.format(checkpoint=checkpoint, new=tmp_path / "new") for part in arguments]
    with open("/dev/full", "w") as full:
        result = llmops(*filled, stdout=full)
    assert result.returncode == 1
    assert result.stderr == (
        "Error: Standard output cannot be written (No space left on device); free space there, or send it elsewhere.\n"
    )


def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)
    result = llmops("--help", stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


INTERRUPTED = """
import importlib, os, signal, sys
from llmops.cli.main import main

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "llmops.cli.doctor":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
            except KeyboardInterrupt:
                raise ImportError("numpy._core.umath failed to import")

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
sys.argv = ["llmops", "doctor"]
main()
"""


def test_ctrl_c_that_a_library_turns_into_an_error_of_its_own():
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stderr) == (130, "Interrupted.\n")


def test_help_imports_nothing_heavy():
    script = "import sys; sys.argv = ['llmops', '--help']\nfrom llmops.cli.main import main\ntry: main()\n"
    script += "except SystemExit: print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    loaded = set(said.rpartition("loaded:")[2].split())
    assert "click" in loaded
    heavy = (
        "numpy torch transformers openvino grpc google fastapi starlette uvicorn pydantic rich httpx jinja2 tokenizers"
    )
    assert not loaded & set(heavy.split())
