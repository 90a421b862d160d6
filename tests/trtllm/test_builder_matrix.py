"""Everything that `build --target tensorrt` accepts, family x format x KV cache x layout x grammars x adapters x
speculative decoding: the engine keeps every option that it is asked for, and config.pbtxt asks for no more.

Where `tensorrt_llm` is installed its own parser and builder take the same arguments (test_the_real_builder).
"""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.model.families import FAMILIES
from llmops.build.quant_formats import FORMATS
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TARGETS
from llmops.build.targets import tensorrt
from llmops.build.targets.nvidia.build_request import allowed_formats
from llmops.build.trtllm.trtllm_build_flags import effective_flags, from_argv
from llmops.errors import InputError
from tests.trtllm import cpp_backend
from tests.trtllm.test_cpp_backend import loaded, make_engine

# What tensorrt_llm/builder.py (build) leaves of the prompt's attention at 1.2.1, read on 2026-11-22: by KV cache, the
# formats for which use_paged_context_fmha survives, and for which use_fp8_context_fmha does.
FP8_ATTENTION = {"fp8", "w4a8_awq"}
PAGED = {"auto": set(FORMATS), "fp8": FP8_ATTENTION, "int8": set()}
FP8_FMHA = {"auto": set(), "fp8": FP8_ATTENTION, "int8": set()}
# the architectures for which reduce_fusion survives on several GPUs
REDUCED = {"llama", "gemma2"}

# what public configurations that run have in common (read on 2026-11-22): NVIDIA's template as a start-up note for the
# 25.05 image fills it, InCogNiTo124/wsc2025 ("always have to be specified": three of them, empty or not), a Nix module
WORKING = {"gpt_model_type", "gpt_model_path", "tokenizer_dir", "xgrammar_tokenizer_info_path",
           "guided_decoding_backend", "kv_cache_free_gpu_mem_fraction"}  # fmt: skip

SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": 4,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512,
         "max_position_embeddings": 4096, "torch_dtype": "float16", "num_local_experts": 8, "num_experts": 8,
         "num_experts_per_tok": 2}  # fmt: skip
LAYOUTS = ((1, 1), (8, 1), (2, 2))
SPECULATIVE = {
    None: {},
    "lookahead_decoding": {"speculative_mode": "lookahead_decoding", "lookahead": "7,7,7"},
    "draft_tokens_external": {"speculative_mode": "draft_tokens_external"},
}
ROWS = [
    (family, quant)
    for family in FAMILIES
    if "tensorrt" in FAMILIES[family].targets
    for quant in allowed_formats(family, "tensorrt")
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            config = {"architectures": [FAMILIES[family].hf_classes[0]], **SIZES}
            (folder / "config.json").write_text(json.dumps(config))
            made[family] = open_checkpoint(str(folder), weights=False)
        return made[family]

    return get


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """One that every family takes."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("adapter")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    root = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{root}.lora_A.weight": np.zeros((8, 1024), "f4"), f"{root}.lora_B.weight": np.zeros((1024, 8), "f4")}
    save_file(weights, folder / "adapter_model.safetensors")
    return {"sql": str(folder)}


def specs(family, quant, adapters):
    """(KV cache, speculative mode, spec) of every cell of a row."""
    cells = itertools.product(TARGETS["tensorrt"].kv_caches, LAYOUTS, (True, False), (None, adapters), SPECULATIVE)
    for kv, (tp, pp), guided, lora, mode in cells:
        options = {"guided": str(guided).lower(), **SPECULATIVE[mode], **({"adapters": lora} if lora else {})}
        yield kv, mode, BuildSpec("c", Path("e"), "tensorrt", quant=quant, kv_cache=kv, tp=tp, pp=pp, options=options)


def arguments(spec, source):
    return tensorrt.target.prepare(spec, source).argv


@pytest.mark.parametrize(("family", "quant"), ROWS)
def test_the_builder_changes_nothing(checkpoint, adapters, family, quant):
    accepted = 0
    for kv, mode, spec in specs(family, quant, adapters):
        if mode == "draft_tokens_external" and quant not in PAGED[kv]:
            with pytest.raises(InputError, match="draft_tokens_external reuses the KV cache"):
                arguments(spec, checkpoint(family))
            continue
        flags = effective_flags(from_argv(arguments(spec, checkpoint(family))[1:]))
        accepted += 1
        assert flags["context_fmha"] == "enable"
        assert (flags["use_paged_context_fmha"] == "enable") == (quant in PAGED[kv])
        assert (flags["use_fp8_context_fmha"] == "enable") == (quant in FP8_FMHA[kv])
        fused = flags["reduce_fusion"] == "enable"
        assert not fused or (spec.tp > 1 and family in REDUCED)
        assert flags["user_buffer"] == "disable" or (fused and quant == "fp8")
        # without pages a prompt is taken in one step
        assert quant in PAGED[kv] or flags["max_input_len"] <= flags["max_num_tokens"]
    assert accepted >= 72


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("paged", [True, False])
def test_what_the_backend_is_told_is_what_the_engine_has(tmp_path, paged, guided, lora, mode):
    if mode == "draft_tokens_external" and not paged:
        pytest.skip("refused by build")
    sizes = [7, 7, 7] if mode == "lookahead_decoding" else None
    extra = {"guided": guided, "speculative": sizes, "adapters": [{"name": "a", "id": 1}] if lora else []}
    entry = make_engine(tmp_path / "e", {"use_paged_context_fmha": paged}, lora_bytes=1000, **extra)
    if guided:
        (entry.directory / "xgrammar_tokenizer_info.json").write_text("{}")
    told = loaded(entry)
    assert set(cpp_backend.MUST) | WORKING <= set(told)
    assert told["enable_chunked_context"] is told["enable_kv_cache_reuse"] is paged
    assert bool(told["xgrammar_tokenizer_info_path"]) == guided
    assert (told["decoding_mode"] == "lookahead") == (mode == "lookahead_decoding")
    assert bool(told.get("lora_prefetch_dir")) == lora


def test_what_needs_pages_is_refused_where_there_are_none(checkpoint):
    source = checkpoint("llama")
    for name in ("enable_chunked_context", "enable_kv_cache_reuse"):
        spec = BuildSpec(
            "c", Path("e"), "tensorrt", quant="int4_awq", kv_cache="fp8", options={f"serve.{name}": "true"}
        )
        with pytest.raises(
            InputError, match=rf"serve\.{name}=true needs paged context FMHA, which --kv-cache fp8 with"
        ):
            tensorrt.target.prepare(spec, source)
    spec = BuildSpec("c", Path("e"), "tensorrt", quant="int8_sq", kv_cache="fp8",
                     options={"flag.use_paged_context_fmha": "enable"})  # fmt: skip
    with pytest.raises(InputError, match="would change --use_paged_context_fmha to disable: an FP8 KV cache needs"):
        tensorrt.target.prepare(spec, source)
    lines = "\n".join(
        tensorrt.target.prepare(BuildSpec("c", Path("e"), "tensorrt", kv_cache="int8"), source).dry_run_lines
    )
    assert "no KV cache reuse, no chunked context" in lines


def test_adapters_want_float16(checkpoint, adapters, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES, "torch_dtype": "bfloat16"})
    )
    source = open_checkpoint(str(tmp_path), weights=False)
    with pytest.raises(InputError, match="this one is bfloat16; add --set dtype=float16, or use --target pytorch"):
        tensorrt.target.prepare(BuildSpec("c", Path("e"), "tensorrt", options={"adapters": adapters}), source)
    spec = BuildSpec("c", Path("e"), "tensorrt", options={"adapters": adapters, "dtype": "float16"})
    assert tensorrt.target.prepare(spec, source).request.dtype == "float16"


@pytest.mark.skipif(find_spec("tensorrt_llm") is None, reason="tensorrt_llm is not installed")
@pytest.mark.parametrize(("family", "quant"), ROWS)
def test_the_real_builder(checkpoint, adapters, monkeypatch, family, quant):
    """`commands/build.py` parses the arguments, and `builder.build` is stopped where it has settled its options."""
    import tensorrt_llm.builder as builder
    from tensorrt_llm.commands.build import parse_arguments
    from tensorrt_llm.models.modeling_utils import PretrainedConfig, SpeculativeDecodingMode
    from tensorrt_llm.plugin import PluginConfig

    class Settled(Exception):
        pass

    def stop(model, build_config):
        raise Settled(build_config.plugin_config)

    monkeypatch.setattr(builder, "optimize_model_with_config", stop)
    algorithms = {"auto": None, "fp8": "FP8", "int8": "INT8"}
    for kv, mode, spec in specs(family, quant, adapters):
        if mode == "draft_tokens_external" and quant not in PAGED[kv]:
            continue
        argv = arguments(spec, checkpoint(family))
        parsed = parse_arguments().parse_args(argv[1:])
        plugins = PluginConfig.from_arguments(parsed)
        asked = {name: getattr(plugins, name) for name in _COMPARED}
        mapping = {"world_size": spec.tp * spec.pp, "tp_size": spec.tp, "pp_size": spec.pp}
        config = PretrainedConfig.from_dict({
            "architecture": FAMILIES[family].hf_classes[0], "dtype": "float16", "mapping": mapping, **CONFIG,
            "quantization": {"quant_algo": FORMATS[quant].algorithm, "kv_cache_quant_algo": algorithms[kv]},
        })  # fmt: skip
        build_config = builder.BuildConfig(
            max_input_len=parsed.max_input_len, max_seq_len=parsed.max_seq_len, max_batch_size=parsed.max_batch_size,
            max_beam_width=parsed.max_beam_width, max_num_tokens=parsed.max_num_tokens,
            max_draft_len=parsed.max_draft_len, plugin_config=plugins, kv_cache_type=parsed.kv_cache_type,
            speculative_decoding_mode=SpeculativeDecodingMode.from_arguments(parsed),
        )  # fmt: skip
        model = type("Model", (), {"config": config})()
        with pytest.raises(Settled) as settled:
            builder.build(model, build_config)
        (kept,) = settled.value.args
        assert {name: getattr(kept, name) for name in _COMPARED} == asked


# of the checkpoint's config.json; the second row is Gemma's
CONFIG = {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 512,
    "max_position_embeddings": 4096, "hidden_act": "silu", "intermediate_size": 2048,
    "query_pre_attn_scalar": 64, "final_logit_softcapping": None, "attn_logit_softcapping": None,
    "_sliding_window_pattern": 6, "rope_local_base_freq": 10000, "sliding_window": 512,
}  # fmt: skip
_COMPARED = ("context_fmha", "use_paged_context_fmha", "use_fp8_context_fmha", "reduce_fusion", "user_buffer",
             "norm_quant_fusion", "remove_input_padding", "tokens_per_block", "multiple_profiles", "gemm_plugin",
             "lora_plugin")  # fmt: skip
