"""`llmops upgrade`: what it says, what it writes, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmops.build.engine_folder.manifest import EngineManifest
from llmops.errors import InputError, VersionMismatchError
from tests.support.commands import llmops
from tests.support.manifests import engine_manifest


def engine(folder: Path, target: str = "pytorch", weights: str = "fp8", **arguments: Any) -> Path:
    folder.mkdir()
    extra = {} if target == "openvino" else {"tensorrt_llm": "1.2.1", "image": "x"}
    if target == "pytorch":
        extra["llm_args"] = {"backend": "pytorch", **arguments}
    engine_manifest(
        target, source={"checkpoint": "./llama", "format": "huggingface", "files": []}, parallelism={"tp_size": 2},
        quantisation={"weights": weights, "kv_cache": "fp8"}, extra=extra,
    ).save(folder)  # fmt: skip
    (folder / "llm_args.json").write_text("{}")
    return folder


def run(*words: object) -> str:
    return llmops("upgrade", *words).output


def test_the_plain_case_says_what_happens_and_rewrites(tmp_path: Path) -> None:
    folder = engine(tmp_path / "e")
    assert run(folder, "--to", "1.3").splitlines() == [
        "Changes:",
        "  sampler_type = TRTLLMSampler is no longer set at start",
        "  generation_config = trtllm is set at start",
        "Gained:",
        "  requests with top_logprobs",
        f"{folder} is now for TensorRT-LLM 1.3.0rc29, in llmops:trtllm-1.3.",
        "The image: docker build -f Dockerfile.trtllm --build-arg BASE=trtllm-1.3 -t llmops:trtllm-1.3 .",
        "Make its repository again: llmops repo",
    ]
    extra = EngineManifest.load(folder).extra
    assert (extra.tensorrt_llm, extra.image) == ("1.3.0rc29", "llmops:trtllm-1.3")
    assert sorted(path.name for path in folder.iterdir()) == ["engine.json", "llm_args.json"]


def test_what_is_renamed_lost_and_gained(tmp_path: Path) -> None:
    speculative = {"decoding_type": "eagle3", "max_draft_len": 3, "speculative_model_dir": "/d", "acceptance_window": 8}
    arguments = {"sampler_type": "TorchSampler", "kv_cache_config": {"onboard_blocks": True, "max_tokens": 64}}
    folder = engine(tmp_path / "e", speculative_config=speculative, moe_config={"backend": "WIDEEP"}, **arguments)
    found = json.loads(run(folder, "--to", "1.3.0", "--json"))
    assert found["changes"] == [
        'speculative_config.decoding_type: "Eagle" becomes "Eagle3"',
        'sampler_type = "TorchSampler" is left out: the release behaves the same without this field',
        "kv_cache_config.onboard_blocks = true is left out: the release behaves the same without this field",
        "generation_config = trtllm is set at start",
    ]
    lost = ["speculative_config.acceptance_window = 8", 'moe_config.backend = "WIDEEP"']
    assert [one.split(":")[0] for one in found["lost"]] == lost
    assert "use acceptance_rate_window_size" in found["lost"][0]
    assert found["gained"] == ["requests with seed"]
    kept = EngineManifest.load(folder).extra.llm_args
    assert kept["speculative_config"] == {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/d"}
    assert json.loads((folder / "llm_args.json").read_text()) == kept
    assert EngineManifest.load(folder).extra.tensorrt_llm == "1.3.0"


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    folder = engine(tmp_path / "e", sampler_type="auto")
    before = (folder / "engine.json").read_bytes()
    assert "would be for TensorRT-LLM 1.3.0rc29" in run(folder, "--to", "1.3", "--dry-run")
    assert (folder / "engine.json").read_bytes() == before
    assert (folder / "llm_args.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("target", "weights", "says"),
    [
        (
            "tensorrt",
            "fp8",
            r"TensorRT engine.*\n  llmops build ./llama -o \S+-1.3 --target pytorch .*--quant fp8 --tp 2",
        ),
        ("tensorrt", "int8_sq", r"runs on TensorRT-LLM 1.2.1 only.*\n.*--quant fp8 .*--kv-cache fp8"),
        ("pytorch", "int8_wo", r"INT8 weight-only weights, which TensorRT-LLM 1.3 does not load.*\n.*--quant fp8"),
        ("openvino", "none", "nothing needs an upgrade"),
    ],
)
def test_what_cannot_be_taken_along_names_what_to_build(tmp_path: Path, target: str, weights: str, says: str) -> None:
    folder = engine(tmp_path / "e", target, weights)
    before = (folder / "engine.json").read_bytes()
    with pytest.raises(InputError, match=says):
        run(folder, "--to", "1.3")
    assert (folder / "engine.json").read_bytes() == before


def test_arguments_that_the_release_refuses_together_name_what_to_build(tmp_path: Path) -> None:
    folder = engine(tmp_path / "e", pipeline_parallel_size=2, speculative_config={"decoding_type": "MTP"})
    says = r"1\.3 has no MTP speculation over pipeline stages; .* Build it again:\n  llmops build ./llama -o \S+-1.3 "
    with pytest.raises(InputError, match=says):
        run(folder, "--to", "1.3")


@pytest.mark.parametrize("to", ["1.1", "2.0.0", "next"])
def test_releases_that_nobody_looked_at(tmp_path: Path, to: str) -> None:
    with pytest.raises(VersionMismatchError, match=r"1\.2\.1"):
        run(engine(tmp_path / "e"), "--to", to)
