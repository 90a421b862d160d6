"""Recipes: each is a plan that `build` takes, fits the machine that it names, and gives a source for every number."""

import json
from pathlib import Path

import pytest

from llmops.build.checkpoint.known_models import known_model
from llmops.build.plan.gpu_specs import find_gpu
from llmops.build.plan.memory.kv_sizes import find_kv
from llmops.build.plan.memory.memory_budget import PlannedLimits, plan_memory
from llmops.build.plan.memory.parallel_layout import ParallelLayout
from llmops.build.plan.model_lookup import look_up_model
from llmops.build.plan.search.plan_request import find_precision
from llmops.build.recipes.catalog import UNSUPPORTED, recipes
from llmops.errors import InputError, LlmopsError
from tests.support.commands import llmops
from tests.support.tiny_models import write_config

NAMES = sorted(recipes())
NUMBERS = ("quantisation", "kv_cache_dtype", "tp_size", "max_batch_size", "max_num_tokens", "max_seq_len",
           "kv_cache_fraction")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_build_takes_the_file_as_it_is(tmp_path, name):
    recipe = recipes()[name]
    (tmp_path / "config.json").write_text(json.dumps(known_model(recipe.model).config))
    output = llmops("build", tmp_path, "-o", tmp_path / "e", "--plan", recipe.file, "--dry-run").output
    assert f"tp {recipe.plan.tp_size}, pp 1" in output
    assert f'"max_batch_size": {recipe.plan.max_batch_size}' in output
    for setting, value in recipe.plan.settings.items():
        assert f'"{setting.rpartition(".")[2]}": {json.dumps(value)}' in output


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_the_machine_that_it_names(name):
    plan, machine = recipes()[name].plan, recipes()[name].machine
    count, _, kind = machine.partition(" x ")
    assert plan.world_size * plan.replicas == int(count)
    assert plan.gpu.startswith(kind.lower())
    model = look_up_model(plan.model).checkpoint.architecture
    plan.check(model)
    precision = find_precision("bf16" if plan.quantisation == "none" else plan.quantisation, model)
    limits = PlannedLimits(plan.max_batch_size, plan.max_num_tokens, plan.max_seq_len, plan.kv_cache_fraction)
    kv = find_kv(plan.kv_cache_dtype, precision)
    layout = ParallelLayout(plan.tp_size, 1, plan.ep_size)
    memory = plan_memory(model, precision, kv, layout, find_gpu(plan.gpu), limits)
    assert memory.fits
    assert memory.kv_cache > 0.1 * memory.total


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name):
    recipe = recipes()[name]
    wanted = {*NUMBERS}
    wanted |= {"settings"} if recipe.plan.settings else set()
    wanted |= {"ep_size"} if recipe.plan.ep_size > 1 else set()
    assert wanted <= set(recipe.sources)
    assert all(recipe.sources.values())
    assert name == recipe.file.stem
    shown = llmops("recipe", "show", name).output
    assert all(source in shown for source in recipe.sources.values())


def test_the_list_names_what_cannot_be_had():
    output = llmops("recipe", "list").output
    assert all(name in output for name in NAMES)
    assert all(f"{model}: {reason}." in output for model, reason in UNSUPPORTED.items())
    assert {row["name"] for row in json.loads(llmops("recipe", "list", "--json").output)["recipes"]} == set(NAMES)


def test_use_writes_the_file_once(tmp_path):
    file = tmp_path / "plan.json"
    assert f"--plan {file}" in llmops("recipe", "use", "llama-3.3-70b", "-o", file).output
    assert file.read_bytes() == recipes()["llama-3.3-70b"].file.read_bytes()
    with pytest.raises(InputError, match="exists; name another file with -o"):
        llmops("recipe", "use", "llama-3.3-70b", "-o", file)


# -- `build --extra-llm-api-options FILE` and `--set llm.KEY=VALUE`: upstream's option files, checked before any work


# as NVIDIA/TensorRT-LLM examples/configs/curated/deepseek-r1-throughput.yaml, with lines of gpt-oss-120b-throughput
# (num_postprocess_workers), of qwen3.8-high-throughput-mtp3 (load_balancer) and of all of examples/configs/database
# (backend), without what trtllm-serve itself takes
UPSTREAM = """
backend: pytorch
num_postprocess_workers: 4
max_batch_size: 64
max_num_tokens: 3200
tensor_parallel_size: 2
enable_attention_dp: false
cuda_graph_config:
  enable_padding: true
  max_batch_size: 64
  batch_sizes: null
kv_cache_config:
  dtype: fp8
  free_gpu_memory_fraction: 0.8
speculative_config:
  decoding_type: NGram
  max_draft_len: 4
moe_config:
  load_balancer: /eplb/qwen3.yaml
stream_interval: 10
"""
EIGHT = "--tp 8 --ep 8"


@pytest.fixture
def checkpoint(tmp_path):
    return write_config(tmp_path / "model", "llama")


def dry_run(checkpoint, *words):
    """(the arguments of the LLM API, or None; the error's message)."""
    try:
        output = Path(checkpoint).parent / "e"
        return llmops("build", checkpoint, "-o", output, "--target", "pytorch", "--dry-run", *words).output, ""
    except LlmopsError as error:
        return None, error.message


def test_a_file_of_upstream_sets_flags_and_fields(checkpoint, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(UPSTREAM)
    text, error = dry_run(checkpoint, "--extra-llm-api-options", str(file))
    assert error == ""
    assert "KV cache fp8, tp 2, pp 1" in text
    arguments = json.loads("{" + text[text.index("**{") + 3 :].rsplit("})", 1)[0] + "}")
    assert (arguments["tensor_parallel_size"], arguments["max_batch_size"]) == (2, 64)
    cache = arguments["kv_cache_config"]
    assert (cache["dtype"], cache["free_gpu_memory_fraction"]) == ("fp8", 0.8)
    assert cache["enable_block_reuse"] is True  # what the file does not name stays
    assert arguments["speculative_config"] == {"decoding_type": "NGram", "max_draft_len": 4}
    assert arguments["stream_interval"] == 10
    # llmapi/llm_args.py of both releases, `MoeConfig.load_balancer: Optional[Union[object, str]]`
    assert (arguments["backend"], arguments["moe_config"]) == ("pytorch", {"load_balancer": "/eplb/qwen3.yaml"})
    # executor/postproc_worker.py, `_handle_input`: these processes return an answer whole for each of its tokens
    assert "num_postprocess_workers" not in arguments


@pytest.mark.parametrize(("name", "gpu", "tokens"), [("R1-0528", "h200", 64), ("R1-0528", "b200", 32),
                                                     ("V3.2", "h200", 64), ("V3.2", "b200", 64)])  # fmt: skip
def test_latent_attention_gets_the_blocks_of_the_gpu(name, gpu, tokens):
    """TensorRT-LLM 1.2.1 and 1.3 `_torch/pyexecutor/py_executor_creator.py`: `tokens_per_block = 64` where
    `ModelConfig.enable_flash_mla` is true, which is on Hopper with a cache of 576 values per token. On Blackwell,
    PR 10261 (1.3.0rc0) removed the kernels of 64; V3.2's README: "Please include `--tokens_per_block 64`".
    """
    text, error = dry_run(f"deepseek-ai/DeepSeek-{name}", "--tp", "8", "--ep", "8", "--gpu", gpu)
    assert (error, f'"tokens_per_block": {tokens}' in text) == ("", True)


def test_experts_in_fp8_blocks_have_the_backend_that_runs_on_the_gpu():
    """1.3.0rc29, deployment-guide-for-deepseek-r1-on-trtllm: "B200/GB200 EP<=8 | FP8 | DEEPGEMM"."""
    words = ("Qwen/Qwen3-235B-A22B-FP8", "--tp", "4", "--ep", "4", "--gpu")
    assert '"backend": "DEEPGEMM"' in dry_run(*words, "b200-sxm")[0]
    assert '"backend": "TRTLLM"' in dry_run(*words, "b200-sxm", "--set", "llm.moe_config.backend=TRTLLM")[0]
    assert '"backend": "DEEPGEMM"' in dry_run(*words, "b200-sxm", "--set", 'llm.moe_config={"max_num_tokens": 8192}')[0]
    assert "DEEPGEMM" not in dry_run(*words, "h200-sxm")[0]
    assert "DEEPGEMM" not in dry_run("Qwen/Qwen3-30B-A3B", "--quant", "fp8", "--gpu", "b200-sxm")[0]


@pytest.mark.parametrize(("hub_id", "gpu", "setting", "says"), [
    ("deepseek-ai/DeepSeek-R1-0528", "h200-sxm", "kv_cache_config.tokens_per_block=32", "blocks of this model have 64"),
    ("deepseek-ai/DeepSeek-R1-0528", "b200-sxm", "kv_cache_config.tokens_per_block=32", ""),
    ("deepseek-ai/DeepSeek-R1-0528", "b200-sxm", "kv_cache_config.tokens_per_block=64", ""),
    ("deepseek-ai/DeepSeek-R1-0528", "b200-sxm --set image=trtllm-1.3", "kv_cache_config.tokens_per_block=64",
     "1.3 has no kernels for KV-cache blocks of 64"),
    ("deepseek-ai/DeepSeek-V3.2", "b200-sxm --set image=trtllm-1.3", "kv_cache_config.tokens_per_block=64", ""),
    ("deepseek-ai/DeepSeek-R1-0528", "b200-sxm", "moe_config.backend=CUTLASS", "llm.moe_config.backend=DEEPGEMM"),
    ("deepseek-ai/DeepSeek-R1-0528", "b200-sxm", "moe_config=null", "llm.moe_config.backend=DEEPGEMM"),
    ("deepseek-ai/DeepSeek-R1-0528", "b200-sxm --set image=trtllm-1.3", "moe_config=null", ""),
    ("deepseek-ai/DeepSeek-R1-0528", "h200-sxm", "moe_config.backend=CUTLASS", ""),
    # 1.3.0rc29, supported-models.md: "supported only with the `xgrammar` backend; `llguidance` is not working"
    ("zai-org/GLM-4.6", "h200-sxm", "guided_decoding_backend=llguidance", "llguidance does not work with GLM 4"),
    # examples/configs/curated/gpt-oss-120b-throughput.yaml is for a B200; cpp/tensorrt_llm/thop/fp8BlockScaleMoe.cpp:
    # "Only SM100f is supported by FP8 block scale MOE"
    ("openai/gpt-oss-120b", "h100-sxm", "moe_config.backend=TRTLLM", "leave llm.moe_config.backend out"),
    ("deepseek-ai/DeepSeek-R1-0528", "h200-sxm", "moe_config.backend=TRTLLM", "leave llm.moe_config.backend out"),
    ("openai/gpt-oss-120b", "b200-sxm", "moe_config.backend=TRTLLM", ""),
    ("openai/gpt-oss-120b", "h100-sxm", "moe_config.backend=TRITON", ""),
    ("openai/gpt-oss-120b", "h100-sxm --set image=trtllm-1.3", "moe_config.backend=TRTLLM", ""),
    # examples/configs/curated/nemotron-super-marlin.yaml names 1
    ("deepseek-ai/DeepSeek-R1-0528", "h200-sxm", "context_parallel_size=1", ""),
    ("deepseek-ai/DeepSeek-R1-0528", "h200-sxm", "context_parallel_size=2", "leave llm.context_parallel_size out"),
    ("Qwen/Qwen3.5-397B-A17B", "h200-sxm", "kv_connector_config.connector=lmcache", "no KV cache connector for qwen3"),
])  # fmt: skip
def test_a_field_that_the_model_cannot_have_is_refused(hub_id, gpu, setting, says):
    error = dry_run(hub_id, "--tp", "8", "--ep", "8", "--gpu", *gpu.split(), "--set", f"llm.{setting}")[1]
    assert says in error if says else not error


@pytest.mark.parametrize(("words", "setting", "says"), [
    ("--tp 8 --ep 8", "moe_tensor_parallel_size=2", "must multiply to --tp 8, not to 16; leave"),
    ("--tp 8 --ep 8", "moe_cluster_parallel_size=2", "must multiply to --tp 8, not to 16; leave"),
    ("--tp 8 --ep 8", "moe_tensor_parallel_size=1", ""),
    ("--tp 8 --ep 8", "moe_tensor_parallel_size=-1", ""),
    ("--tp 8 --ep 1", "moe_tensor_parallel_size=-1", "would split the MLP of 1536 into 8 parts"),
    ("--tp 4 --ep 4 --pp 2", "pp_partition=[50,44]", ""),
    ("--tp 4 --ep 4 --pp 2", "pp_partition=[50,40]", "2 numbers, as --pp, that add up to 94 layers; leave"),
    ("--tp 4 --ep 4 --pp 2", "pp_partition=[94]", "2 numbers, as --pp, that add up to 94 layers; leave"),
    ("--tp 4 --ep 4 --pp 2", 'pp_partition=["47","47"]', "2 numbers, as --pp, that add up to 94 layers; leave"),
    ("--tp 8 --ep 8", "enable_lm_head_tp_in_adp=true", "needs llm.enable_attention_dp=true"),
    ("--tp 8 --ep 8 --set llm.enable_attention_dp=true", "enable_lm_head_tp_in_adp=true", ""),
])  # fmt: skip
def test_sizes_that_fit_no_layout_are_refused(words, setting, says):
    """1.2 tensorrt_llm/mapping.py: "moe_tp_size * moe_ep_size * moe_cluster_size must equal to", `pp_layers`, "does not
    match", "enable_lm_head_tp_in_adp requires enable_attention_dp".
    """
    error = dry_run("Qwen/Qwen3-235B-A22B-FP8", *words.split(), "--set", f"llm.{setting}")[1]
    assert says in error if says else not error


@pytest.mark.parametrize(("hub_id", "words", "says"), [
    ("deepseek-ai/DeepSeek-R1-0528", f"{EIGHT} --set llm.kv_cache_config.tokens_per_block=32",
     "tokens_per_block to 64, or name another GPU with --gpu."),
    # "FP8 block-scale MoE still requires SM90 or SM120" (NVIDIA/TensorRT-LLM #6805)
    ("Qwen/Qwen3-30B-A3B-FP8", "--gpu l40s", "no kernels for fp8_block experts; use --quant fp8 of the full-precision"),
    ("Qwen/Qwen3-30B-A3B-FP8", "--gpu h100-sxm", ""),
    # "WFP4A16 MoE is unsupported on SM89" (#6717)
    ("openai/gpt-oss-20b", "--gpu l4", "no kernels for mxfp4 experts; name an H100 or H200"),
    ("Qwen/Qwen3-8B", "--gpu b200-sxm --quant fp8_pc_pt", "no kernels for fp8_pc_pt weights; use --quant fp8, or name"),
    # "flash_mla kernel requires KV cache in BFloat16" (NVIDIA/Model-Optimizer #763, on 8 x H200)
    ("deepseek-ai/DeepSeek-V3.2", f"--gpu h200-sxm {EIGHT} --kv-cache fp8", "no FP8 KV cache for sparse attention; us"),
    ("deepseek-ai/DeepSeek-V3.2", f"--gpu h200-sxm {EIGHT}", ""),
    ("deepseek-ai/DeepSeek-V3.2", f"--gpu b200-sxm {EIGHT} --kv-cache fp8", ""),
    ("deepseek-ai/DeepSeek-R1-0528", f"--gpu h200-sxm {EIGHT} --kv-cache fp8", ""),
    # "trtllm-gen kernel library does not ship context kernels for headDim=96 (affects Phi-3 family models)"
    ("microsoft/Phi-3.5-mini-instruct", "--gpu b200-sxm --quant fp8 --kv-cache fp8", "no FP8 attention for heads of"),
    ("microsoft/Phi-3.5-mini-instruct", "--gpu b200-sxm --quant fp8", ""),
])  # fmt: skip
def test_a_gpu_without_kernels_is_refused(hub_id, words, says):
    error = dry_run(hub_id, *words.split())[1]
    assert says in error if says else not error


def test_the_command_line_wins(checkpoint, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(UPSTREAM)
    words = ("--extra-llm-api-options", str(file), "--tp", "4", "--set", "llm.stream_interval=1")
    text, _ = dry_run(checkpoint, *words)
    assert "tp 4, pp 1" in text
    assert '"stream_interval": 1' in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("kv_cache_config:\n  free_gpu_memory_fractoin: 0.8\n", "you mean kv_cache_config.free_gpu_memory_fraction?"),
        ("enable_chunked_prefil: true\n", "did you mean enable_chunked_prefill?"),
        ("stream_interval: ten\n", "stream_interval is 'ten'; the LLM API wants int."),
        ("- a\n- b\n", "holds no options; write one `name: value` per line"),
        ("a: [\n", "is not valid YAML"),
        ("model: /elsewhere\n", "--set llm.model is not possible, because the engine folder sets this field"),
        ("generation_config: auto\n", "1.2 has no field generation_config"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(checkpoint, tmp_path, content, says):
    file = tmp_path / "options.yaml"
    file.write_text(content)
    assert says in dry_run(checkpoint, "--extra-llm-api-options", str(file))[1]


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("llm.tensor_parallel_size=4", "give --tp 4 instead"),
        ("llm.max_batch_size=9", "give --max-batch-size 9 instead"),
        ("llm.kv_cache_config.dtype=fp8", "give --kv-cache fp8 instead"),
        ("llm.kv_cache_config.dtype=nvfp4", "this field; give --kv-cache auto or fp8."),
        ("llm.max_batch_size=null", "this field; leave it out."),
        ('llm.kv_cache_config={"dtype": "fp8"}', "give --kv-cache fp8 instead"),
        ("llm.kv_cache_config=null", "--set llm.kv_cache_config=null contradicts --kv-cache, which sets this field; l"),
        ("llm.kv_cache_config={}", "this field; leave it out."),
    ],
)
def test_a_setting_does_not_contradict_a_flag(checkpoint, setting, instead):
    assert instead in dry_run(checkpoint, "--set", setting)[1]
