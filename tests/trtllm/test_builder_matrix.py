"""Everything that `build --target tensorrt` accepts, family x format x KV cache x layout x grammars x adapters x
speculative decoding: the engine keeps every option that it is asked for, and config.pbtxt asks for no more.

Where `tensorrt_llm` is installed its own parser and builder take the same arguments (test_the_real_builder).
"""

import functools
import itertools
import json
from pathlib import Path

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.model.families import FAMILIES
from llmops.build.quant_formats import FORMATS
from llmops.build.spec import BuildSpec
from llmops.build.target_facts import TARGETS
from llmops.build.targets import tensorrt
from llmops.build.targets.build_target import get_target
from llmops.build.targets.nvidia.build_request import allowed_formats
from llmops.build.trtllm.trtllm_build_flags import effective_flags, from_argv
from llmops.errors import InputError
from tests.trtllm.test_adapters import write_adapter

# What tensorrt_llm/builder.py (build) leaves of the prompt's attention at 1.2.1, read on 2026-11-22: by KV cache, the
# formats for which use_paged_context_fmha survives, and for which use_fp8_context_fmha does.
FP8_ATTENTION = {"fp8", "w4a8_awq"}
PAGED = {"auto": set(FORMATS), "fp8": FP8_ATTENTION, "int8": set()}
FP8_FMHA = {"auto": set(), "fp8": FP8_ATTENTION, "int8": set()}
# the architectures for which reduce_fusion survives on several GPUs
REDUCED = {"llama", "gemma2"}


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
ON_TENSORRT = [name for name, family in FAMILIES.items() if "tensorrt" in family.targets]
ROWS = [(family, quant) for family in ON_TENSORRT for quant in allowed_formats(family, "tensorrt")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def get(family):
        folder = tmp_path_factory.mktemp(family)
        config = {"architectures": [FAMILIES[family].hf_classes[0]], **SIZES}
        (folder / "config.json").write_text(json.dumps(config))
        return open_checkpoint(str(folder), weights=False)

    return get


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """One that every family takes."""
    folder = tmp_path_factory.mktemp("adapter") / "a"
    return {"sql": str(write_adapter(folder, {"q_proj": (1024, 1024)}, target_modules=["q_proj"]))}


def specs(family, quant, adapters):
    """(KV cache, speculative mode, spec) of every cell of a row."""
    layouts = LAYOUTS if family != "phi3" else (*LAYOUTS[:2], (2, 1))
    cells = itertools.product(TARGETS["tensorrt"].kv_caches, layouts, (True, False), (None, adapters), SPECULATIVE)
    for kv, (tp, pp), guided, lora, mode in cells:
        options = {"guided": str(guided).lower(), **SPECULATIVE[mode], **({"adapters": lora} if lora else {})}
        engine = {"quant": quant, "kv_cache": kv, "tp": tp, "pp": pp, "gpu": "h100-sxm", "options": options}
        yield kv, mode, BuildSpec("c", Path("e"), "tensorrt", **engine)


def arguments(spec, source):
    return tensorrt.target.prepare(spec, source).argv


@pytest.mark.parametrize(("family", "quant"), ROWS)
def test_the_builder_changes_nothing(checkpoint, adapters, family, quant):
    accepted = 0
    # quantization/layers.py, Fp8RowwiseAttention: "lora is not supported on … now"
    for kv, mode, spec in specs(family, quant, adapters):
        without_lookahead = mode == "lookahead_decoding" and family in ("gemma2", "gemma3", "phi3")
        refusals = {
            "engines of --quant fp8_pc_pt take no adapters": quant == "fp8_pc_pt" and "adapters" in spec.options,
            "lookahead_decoding take no adapters": mode == "lookahead_decoding" and "adapters" in spec.options,
            "draft_tokens_external reuses the KV": mode == "draft_tokens_external" and quant not in PAGED[kv],
            "lookahead_decoding is not possible: trtllm-build does not have it": without_lookahead,
        }
        if says := next((text for text, applies in refusals.items() if applies), ""):
            with pytest.raises(InputError, match=says):
                arguments(spec, checkpoint(family))
            continue
        flags = effective_flags(from_argv(arguments(spec, checkpoint(family))[1:]))
        accepted += 1
        assert flags["context_fmha"] == "enable"
        assert (flags["use_paged_context_fmha"] == "enable") == (quant in PAGED[kv])
        assert (flags["use_fp8_context_fmha"] == "enable") == (quant in FP8_FMHA[kv])
        fused = flags["reduce_fusion"] == "enable"
        assert not fused or (spec.tp > 1 and family in REDUCED and quant != "fp8_pc_pt")
        buffered = fused and family == "llama" and quant == "fp8" and flags["lora_plugin"] == "disable"
        assert flags["user_buffer"] == ("enable" if buffered else "disable")
        # without pages a prompt is taken in one step
        assert quant in PAGED[kv] or flags["max_input_len"] <= flags["max_num_tokens"]
    least = 36 if family in ("gemma2", "gemma3", "phi3") else 54
    assert accepted >= (least // 2 if quant == "fp8_pc_pt" else least)


def test_what_needs_pages_is_refused_where_there_are_none(checkpoint):
    source = checkpoint("llama")
    needs, change = "=true needs paged context FMHA, which --kv-cache fp8 with", "an FP8 KV cache needs"
    for quant, option, value, said in (
        ("int4_awq", "serve.enable_chunked_context", "true", f"serve.enable_chunked_context{needs}"),
        ("int4_awq", "serve.enable_kv_cache_reuse", "true", f"serve.enable_kv_cache_reuse{needs}"),
        ("int8_sq", "flag.use_paged_context_fmha", "enable", f"change --use_paged_context_fmha to disable: {change}"),
    ):
        spec = BuildSpec("c", Path("e"), "tensorrt", quant=quant, kv_cache="fp8", options={option: value})
        with pytest.raises(InputError, match=said):
            tensorrt.target.prepare(spec, source)
    # executor/executorImpl.cpp, fetchNewRequests: "Request sequence length is potentially greater than max input
    # length. This cannot be run unless streaming is disabled, context chunking is enabled or the GUARANTEED_NO_EVICT…"
    # batch_manager/trtGptModel.h: "maxInputLen = min(maxSequenceLen - 1, maxNumTokens) since context FMHA…"
    for cache, chunked in (("int8", {}), ("auto", {"serve.enable_chunked_context": "false"})):
        options = {"serve.batch_scheduler_policy": "max_utilization", **chunked}
        sizes = {"max_num_tokens": 64, "max_batch_size": 8}
        spec = BuildSpec("c", Path("e"), "tensorrt", kv_cache=cache, options=options, **sizes)
        with pytest.raises(InputError, match="streams of more than 65 tokens, prompt and answer together"):
            tensorrt.target.prepare(spec, source)
    job = tensorrt.target.prepare(BuildSpec("c", Path("e"), "tensorrt", kv_cache="int8"), source)
    assert "no KV cache reuse, no chunked context" in "\n".join(job.dry_run_lines)


def test_phi3_has_no_pipeline_stages(checkpoint):
    """1.2.1 models/phi3/model.py: Phi3Model has an embedding and a last norm on every rank, and `forward` takes no
    hidden_states of an earlier one, unlike LLaMAModel, QWenModel and GemmaModel.
    """
    with pytest.raises(InputError, match=r"--pp is not possible: .* no pipeline stages; use --tp"):
        tensorrt.target.prepare(BuildSpec("c", Path("e"), "tensorrt", tp=2, pp=2), checkpoint("phi3"))
    get_target("pytorch").prepare(BuildSpec("c", Path("e"), "pytorch", tp=2, pp=2), checkpoint("phi3"))


def test_adapters_want_float16(checkpoint, adapters, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], **SIZES, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_checkpoint(str(tmp_path), weights=False)
    with pytest.raises(InputError, match="this engine is bfloat16; add --set dtype=float16, or use --target pytorch"):
        tensorrt.target.prepare(BuildSpec("c", Path("e"), "tensorrt", options={"adapters": adapters}), source)
    spec = BuildSpec("c", Path("e"), "tensorrt", options={"adapters": adapters, "dtype": "float16"})
    assert tensorrt.target.prepare(spec, source).request.dtype == "float16"
