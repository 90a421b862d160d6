"""Everything that `build` accepts, to the last argument: every family x weights x KV cache x target, with and without
grammars, adapters and speculation. What comes out is put through what the other side does with it.

`tensorrt`: config.pbtxt is read as NVIDIA's C++ backend reads it. `pytorch`: the arguments go through the classes of
1.2.1 and 1.3 in the stand-in, and where TensorRT-LLM is installed through its own.

Which weights and caches a family can have is test_loader_matrix.py's; here each is combined with everything else.
"""

import itertools
import json
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from llmops_engine.runtimes import executor as runtime
from llmops_engine.runtimes import trtllm_library as engine

from llmops.build.checkpoint import open_checkpoint
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.model.families import FAMILIES
from llmops.build.quant_formats import FORMATS
from llmops.build.spec import BuildSpec
from llmops.build.targets.build_target import get_target as build_target
from llmops.build.targets.tensorrt.tensorrt_options import lookahead_sizes
from llmops.errors import LlmopsError
from llmops.model_repository.generate import EngineEntry, model_folders, model_metadata
from llmops.model_repository.repository.pbtxt import parse_config
from llmops.model_repository.targets import find_target
from tests.support import tiny_models as models
from tests.support.manifests import engine_manifest
from tests.trtllm import cpp_backend, standin
from tests.trtllm import standin_executor as executor
from tests.trtllm.test_adapters import write_adapter

KV_CACHES = ("auto", "fp8", "int8")
# what 1.3 does not load, and so has no profile for
NOT_ON_1_3 = {"int8_wo"}
SPECULATION: dict[str, tuple[dict[str, Any], ...]] = {
    "tensorrt": ({}, {"speculative_mode": "lookahead_decoding", "lookahead": "7,7,7"},
                 {"speculative_mode": "draft_tokens_external"}),
    "pytorch": ({}, {"llm.speculative_config": '{"decoding_type": "NGram", "max_draft_len": 4}'},
                {"llm.speculative_config": '{"decoding_type": "MTP"}'},
                {"llm.speculative_config":
                 '{"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "/d"}'}),
}  # fmt: skip
GUIDED = {"tensorrt": ({}, {"guided": "false"}), "pytorch": ({}, {"llm.guided_decoding_backend": "null"})}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> a checkpoint with a config.json alone, and one adapter for all."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("configs")
    for family in models.CLASSES:
        models.write_config(root / family, family)
    write_adapter(root / "adapter")
    return root


def cells(target: str, family: str) -> Any:
    """Return a sample of (weights, KV cache, tp, grammars, adapters, speculation); LLMOPS_EVERY_CELL=1 tries all."""
    found = list(every_cell(target))
    step = 1 if os.environ.get("LLMOPS_EVERY_CELL") else 5 if family == "llama" else 11
    return [found[0], *found[len(family) % step :: step]]


def every_cell(target: str) -> Any:
    """Two GPUs for each kind of weights and cache, and one GPU for everything else."""
    plain = (GUIDED[target][0], False, SPECULATION[target][0])
    formats = [name for name, quant_format in FORMATS.items() if target in quant_format.targets]
    for quant, kv_cache in itertools.product(formats, KV_CACHES):
        for cell in itertools.product(GUIDED[target], (False, True), SPECULATION[target]):
            yield quant, kv_cache, 1, *cell
        yield quant, kv_cache, 2, *plain


def manifest_of(job: Any) -> EngineManifest:
    """Return engine.json as `build` would write it, as far as the repository reads it."""
    spec, checkpoint, request = job.spec, job.checkpoint, job.request
    if spec.target == "tensorrt":
        extra = {"guided": job.guided, "speculative": lookahead_sizes(spec), "serve": job.serve, "lora_bytes": 1 << 20}
    else:
        extra = {"llm_args": job.arguments}
    adapters = [{"name": "sql", "id": 1}] if "adapters" in spec.options else []
    return engine_manifest(
        spec.target, architecture=checkpoint.architecture.hf_class, limits=request.limits,
        quantisation={"weights": request.quant_format.name, "kv_cache": request.kv_cache},
        parallelism={"tp_size": spec.tp, "pp_size": spec.pp, "ep_size": spec.ep},
        extra={"tensorrt_llm": request.image.tensorrt_llm, "adapters": adapters, **extra},
    )  # fmt: skip


def check_cpp(config: Any, announced: dict[str, Any], manifest: EngineManifest) -> None:
    read = cpp_backend.load({name: one.string_value for name, one in config.parameters.items()})
    assert cpp_backend.as_table(config.input) == cpp_backend.table(cpp_backend.INPUTS)
    guided = manifest.extra.guided and not manifest.extra.speculative
    assert bool(read["guided_decoding_backend"]) == bool(announced["guided"]) == guided
    assert ("lora_prefetch_dir" in read) == announced["lora"]
    if manifest.extra.speculative:
        names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
        assert [read["decoding_mode"], *(read[name] for name in names)] == ["lookahead", 7, 7, 7]


def check_executor(config: Any, announced: dict[str, Any], manifest: EngineManifest) -> None:
    """The same engine with `--serving llmops`: the parameters become the executor's, and promise no less."""
    parameters = {name: one.string_value for name, one in config.parameters.items()}
    # the tokenizer's vocabulary is written by the build
    guided = parameters.pop("xgrammar_tokenizer_info_path")
    assert bool(guided) == bool(announced["guided"]) == (manifest.extra.guided and not manifest.extra.speculative)
    made = runtime.executor_config(executor, parameters, manifest.limits.max_batch_size)
    assert bool(made.peft_cache_config) == announced["lora"]
    lookahead = made.decoding_config.lookahead_decoding_config
    assert bool(lookahead) == bool(manifest.extra.speculative)
    assert parameters["world_size"] == str(manifest.parallelism.world_size)


def check_llm_api(config: Any, announced: dict[str, Any], manifest: EngineManifest) -> None:
    quant = manifest.quantisation.weights
    profiles = json.loads(config.parameters["llm_profiles"].string_value)
    expected = [([1, 2], False), ([1, 3], quant in NOT_ON_1_3)]
    assert [(one["since"], bool(one["refused"])) for one in profiles] == expected
    for version in ("1.2.1", *(() if quant in NOT_ON_1_3 else ("1.3.0rc29",))):
        library = standin.api(version)
        profile = engine.choose_profile(profiles, version)
        arguments = engine.final_arguments(library, profile, "model", "tokenizer")
        library.LLM(**arguments)
        engine.check_announced(announced, profile, version)
        assert arguments["tensor_parallel_size"] == manifest.parallelism.tp_size
        assert (arguments.get("guided_decoding_backend") == "xgrammar") == bool(announced["guided"])
        assert bool(arguments.get("enable_lora")) == announced["lora"]
        plain = arguments.get("speculative_config") is None
        assert profile["sampling"] == {
            "min_p": plain, "seed": plain or version != "1.2.1", "penalties": plain, "logit_bias": plain,
            # 1.2's sampler with penalties knows the sampled token alone
            "top_logprobs": plain and version != "1.2.1", "prompt_logprobs": plain,
        }  # fmt: skip
        # the engines are built for 1.2.1
        assert [announced[name] for name in ("min_p", "seed", "penalties", "logit_bias")] == [plain] * 4
        assert announced["top_logprobs"] == 0
    if find_spec("tensorrt_llm") is not None:
        library = engine.load_library()
        engine.final_arguments(library, engine.choose_profile(profiles, library.version), "model", "tokenizer")


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """engine.json files that went through the other side; a repository does not look at the architecture."""
    return set()


@pytest.mark.parametrize("target", ["tensorrt", "pytorch"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_all_that_build_accepts_is_what_the_other_side_takes(checkpoints, seen, tmp_path, monkeypatch, family, target):
    # the stand-in is 1.2.1; what is made of a family does not depend on the release that brought it
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], since=(1, 2)))
    assert (checkpoints / family).is_dir(), "tests/support/tiny_models.py knows every family"
    checkpoint = open_checkpoint(str(checkpoints / family), weights=False)
    builder, repository_target = build_target(target), find_target(target)
    adapters: dict[str, Any] = {"adapters": {"sql": str(checkpoints / "adapter")}}
    if target == "tensorrt":  # its backend takes no bfloat16 adapters
        adapters["dtype"] = "float16"
    accepted = 0
    for quant, kv_cache, tp, guided, lora, speculation in cells(target, family):
        options = {**guided, **speculation, **(adapters if lora else {})}
        try:
            spec = BuildSpec("x", tmp_path / "e", target, "tiny", quant, kv_cache, tp=tp, options=options)
            job = builder.prepare(spec, checkpoint)
        except LlmopsError:
            continue
        accepted += 1
        manifest = manifest_of(job)
        key = manifest.model_dump_json(exclude={"architecture"})
        if key in seen:
            continue
        seen.add(key)
        entry = EngineEntry("tiny", tmp_path / "e", manifest, repository_target)
        text = next(one.config for one in model_folders(entry) if one.name == "tiny-tensorrt_llm")
        config, announced = parse_config(text, "tiny"), model_metadata(entry)["capabilities"]
        if target == "tensorrt":
            check_cpp(config, announced, manifest)
            ours = EngineEntry("tiny", tmp_path / "e", manifest, find_target(target, "llmops"))
            text = next(one.config for one in model_folders(ours) if one.name == "tiny-tensorrt_llm")
            check_executor(parse_config(text, "tiny"), model_metadata(ours)["capabilities"], manifest)
        else:
            check_llm_api(config, announced, manifest)
    assert bool(accepted) == (target in FAMILIES[family].targets)
