"""LoRA from the adapter's folder to the engine's: what is refused, and the C++ backend's files."""

import json
from pathlib import Path

import numpy as np
import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.lora_adapters import adapters_digest, read_adapters
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.trtllm.backend_files import convert_adapter, engine_modules, tokenizer_info
from llmops.errors import CheckpointError, InputError
from tests.support.commands import llmops
from tests.support.programs import install_program
from tests.support.tiny_models import write_checkpoint

torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
HIDDEN, KV = 256, 128
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "v_proj"]}


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]] | None = None, layers: int = 2, **config) -> Path:
    """A PEFT folder: `modules` are (in, out) by Hugging Face name."""
    settings = {**CONFIG, **config}
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(layers):
        for module, (wide, out) in (modules or {"q_proj": (HIDDEN, HIDDEN), "v_proj": (HIDDEN, KV)}).items():
            group = "self_attn" if module[0] in "qkvo" else "mlp"
            root = f"base_model.model.model.layers.{layer}.{group}.{module}"
            weights[f"{root}.lora_A.weight"] = torch.randn(settings["r"], wide, generator=generator)
            weights[f"{root}.lora_B.weight"] = torch.randn(out, settings["r"], generator=generator)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def architecture(checkpoint: Path):
    return open_checkpoint(str(checkpoint)).architecture


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_each_row_is_what_the_adapter_adds_to_its_layer(tmp_path, architecture, rslora, scale):
    """B A alpha/r (PEFT's definition; alpha/sqrt(r) for rsLoRA) comes out of a row again."""
    folder = write_adapter(tmp_path / "a", use_rslora=rslora)
    (adapter,) = read_adapters({"a": folder}, architecture)
    weights, config = convert_adapter(adapter, architecture, 1)
    assert (weights.dtype, weights.shape) == (np.float16, (1, 4, 4 * (HIDDEN + HIDDEN)))
    assert config.tolist() == [[[1, 0, 4], [3, 0, 4], [1, 1, 4], [3, 1, 4]]]
    source = safetensors.load_file(folder / "adapter_model.safetensors")
    for row, (module, layer, rank) in zip(weights[0], config[0], strict=True):
        name = {1: "q_proj", 3: "v_proj"}[module]
        root = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        a, b = source[f"{root}.lora_A.weight"].numpy(), source[f"{root}.lora_B.weight"].numpy()
        mine = row[a.size : a.size + b.size].reshape(b.shape) @ row[: a.size].reshape(rank, -1)
        np.testing.assert_allclose(mine.astype(np.float32), b @ a * scale, atol=0.2)
        assert not row[a.size + b.size :].any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_dora": True}, "with DoRA"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "ranks that differ"),
        # splitkGroupGemm.cu and groupGemm.cu choose the alignment from the smallest rank of a step, 8 for 8 and more,
        # 4 for 4 and more, and so on, and TLLM_CHECK that the ranks are multiples of it (NVIDIA/TensorRT-LLM #3684)
        ({"r": 12}, "with rank 12"),
        ({"r": 3}, "with rank 3"),
        # PEFT 0.21.2 loads each of these as it was trained; W + B A alpha/r gives other logits
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "change of the model's own weights"),
        ({"alora_invocation_tokens": [5, 6]}, "tokens that switch it on"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "repeated layers"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"modules": {"q_proj": (512, 512)}}, r"of another model: .* \[4, 512\], and this model has 2 layers of 256"),
        ({"layers": 3}, "of another model"),
        ({"modules": {"experts": (HIDDEN, 8)}}, "adapters may change q_proj"),
    ],
)
def test_an_adapter_that_cannot_be_served(tmp_path, architecture, change, says):
    folder = write_adapter(tmp_path / "a", **change)
    with pytest.raises(CheckpointError, match=says):
        read_adapters({"a": folder}, architecture)


def test_other_weights_make_another_engine(tmp_path):
    first = adapters_digest({"a": write_adapter(tmp_path / "a")})
    assert first == adapters_digest({"a": write_adapter(tmp_path / "b")})
    assert first != adapters_digest({"a": write_adapter(tmp_path / "c", r=8)})


@pytest.mark.parametrize("target", ["pytorch", "tensorrt"])
def test_build_and_repo_carry_adapters(tmp_path, checkpoint, monkeypatch, target):
    script = "#!/bin/sh\necho '{}' > model/config.json && echo e > model/rank0.engine\n"
    install_program(monkeypatch, tmp_path / "bin" / "trtllm-build", script)
    sql, chat = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", {"o_proj": (HIDDEN, HIDDEN)}, r=8)
    engine, repository = tmp_path / "engine", tmp_path / "repository"
    adapters = ["--adapter", f"sql={sql}", "--adapter", f"chat={chat}", "--set", "quality=false"]
    llmops("build", checkpoint, "-o", engine, "--target", target, "--name", "tiny", *adapters)
    manifest = EngineManifest.load(engine)
    assert [one.model_dump() for one in manifest.adapters] == [{"name": "sql", "id": 1}, {"name": "chat", "id": 2}]
    copied, given = (folder / "adapter_model.safetensors" for folder in (engine / "lora" / "chat", chat))
    assert copied.read_bytes() == given.read_bytes()
    llmops("repo", engine, "-o", repository)
    config = (repository / "tiny-tensorrt_llm" / "config.pbtxt").read_text()
    if target == "pytorch":
        assert manifest.extra.llm_args["enable_lora"] is True
        assert manifest.extra.llm_args["lora_config"] == {
            "lora_target_modules": ["attn_q", "attn_v", "attn_dense"],
            "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2,
        }  # fmt: skip
        assert str(engine / "lora" / "sql") in config
        return
    argv = " ".join(manifest.extra.trtllm_build)
    # tensorrtllm_backend r26.07 docs/lora.md names all three for adapters of q_proj and v_proj: the
    # engine has inputs for all (1.2.1 models/generation_mixin.py, missing_qkv_modules), which
    # cpp/tensorrt_llm/runtime/loraManager.cpp fills for the modules of config.json only
    assert "--lora_plugin auto --max_lora_rank 8 --lora_target_modules attn_q attn_v attn_dense attn_k" in argv
    assert f'"lora_prefetch_dir" value: {{ string_value: "{engine}/lora_prefetch"' in config
    assert sorted(p.relative_to(engine).as_posix() for p in (engine / "lora_prefetch").rglob("*.npy")) == [
        f"lora_prefetch/{i}/model.lora_{what}.npy" for i in (1, 2) for what in ("config", "weights")
    ]


def test_an_engine_of_a_large_rank_tells_the_backend(tmp_path, checkpoint):
    """peftCacheManager.cpp takes 64 for the largest rank unless lora_cache_max_adapter_size says otherwise."""
    wide = write_adapter(tmp_path / "a", r=96)
    words = ("--target", "tensorrt", "--adapter", f"a={wide}", "--name", "x", "--set", "quality=false")
    llmops("build", checkpoint, "-o", tmp_path / "e", *words)
    assert EngineManifest.load(tmp_path / "e").extra.serve["lora_cache_max_adapter_size"] == "96"


def rows_of_ranks(adapter, arch, tp):
    """(layer, module id) -> A, and B of each rank, as the runtime of 1.2.1 cuts a row.

    cpp/tensorrt_llm/runtime/loraModule.cpp, createLoraModules, has the sizes of the modules, and loraCache.cpp,
    copyToPages, gives each rank as many rows of B, one after the other (2a9abd9536aa, 063e02f73410).
    """
    weights, config = convert_adapter(adapter, arch, tp)
    heads, kv_heads = arch.num_heads // tp * tp, max(arch.num_kv_heads // tp, 1) * tp
    out = {1: heads * arch.head_dim, 2: kv_heads * arch.head_dim, 3: kv_heads * arch.head_dim,
           5: arch.intermediate_size, 7: arch.intermediate_size}  # fmt: skip
    found = {}
    for row, (module, layer, rank) in zip(weights[0].astype(np.float32), config[0].tolist(), strict=True):
        inside, outside = rank * arch.hidden_size, rank * out[module]
        b = row[inside : inside + outside].reshape(tp, -1, rank)
        found[layer, module] = row[:inside].reshape(rank, -1), b
    return found


def test_packed_matrices_reach_each_gpu_in_its_own_parts(tmp_path):
    """1.2.1 layers/attention.py adds attn_q, attn_k and attn_v to a packed matrix; layers/mlp.py, fc_gate_lora, ignores
    mlp_h_to_4h without mlp_gate, and puts mlp_gate (up) before mlp_h_to_4h (gate), where Phi-3's class has it.
    """
    arch = open_checkpoint(str(write_checkpoint(tmp_path / "tiny", "phi3"))).architecture
    packed = {"qkv_proj": (HIDDEN, 512), "gate_up_proj": (HIDDEN, 1024)}
    (adapter,) = read_adapters({"a": write_adapter(tmp_path / "a", packed)}, arch)
    assert sorted(engine_modules([adapter], ())) == ["attn_k", "attn_q", "attn_v", "mlp_gate", "mlp_h_to_4h"]
    source = {name: tensor.numpy() for name, tensor in safetensors.load_file(adapter.weights).items()}
    root = "base_model.model.model.layers.1."
    b = source[f"{root}self_attn.qkv_proj.lora_B.weight"] * adapter.scale
    gate, up = np.split(source[f"{root}mlp.gate_up_proj.lora_B.weight"] * adapter.scale, 2)
    found = rows_of_ranks(adapter, arch, 2)
    for rank in (0, 1):
        wanted = {1: b[:256], 2: b[256:384], 3: b[384:], 5: gate, 7: up}
        for module, rows in wanted.items():
            np.testing.assert_allclose(found[1, module][1][rank], np.split(rows, 2)[rank], atol=0.01)
    np.testing.assert_allclose(found[1, 3][0], source[f"{root}self_attn.qkv_proj.lora_A.weight"], atol=0.01)


def test_more_gpus_than_kv_heads_get_copies_of_a_head(tmp_path, architecture):
    (adapter,) = read_adapters({"a": write_adapter(tmp_path / "a")}, architecture)
    b = safetensors.load_file(adapter.weights)["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].numpy()
    rows = rows_of_ranks(adapter, architecture, 8)[0, 3][1]
    for rank in range(8):  # of 4 KV heads with 32 numbers
        np.testing.assert_allclose(rows[rank], b[rank // 2 * 32 :][:32] * adapter.scale, atol=0.01)


def test_an_engine_takes_an_adapter_of_one_half_of_the_mlp(tmp_path, architecture):
    """1.2.1 layers/mlp.py, fc_gate_lora: None, unless there are inputs for mlp_h_to_4h and for mlp_gate."""
    adapters = read_adapters({"a": write_adapter(tmp_path / "a", {"up_proj": (HIDDEN, 512)})}, architecture)
    assert engine_modules(adapters, ()) == ["mlp_gate", "mlp_h_to_4h"]


@pytest.mark.parametrize("target", ["pytorch", "tensorrt"])
def test_an_adapter_of_an_output_that_is_wider_than_the_model(tmp_path, target):
    """NVIDIA/TensorRT-LLM #17153, after 1.2.1: loraModule.cpp had `hidden` as the input of attn_dense."""
    folder = write_checkpoint(tmp_path / "tiny", "qwen3", head_dim=64)
    adapter = write_adapter(tmp_path / "a", {"o_proj": (512, HIDDEN)})
    words = ("build", folder, "-o", tmp_path / "e", "--target", target, "--adapter", f"sql={adapter}", "--dry-run")
    with pytest.raises(InputError, match=r"o_proj, which has 512 inputs, and TensorRT-LLM before 1\.3 assumes 256"):
        llmops(*words, *(("--set", "dtype=float16") if target == "tensorrt" else ()))
    if target == "pytorch":
        llmops(*words, "--set", "image=trtllm-1.3")


def test_the_pytorch_backend_is_led_to_packed_matrices(tmp_path):
    """As NVIDIA/TensorRT-LLM tensorrt_llm/_torch/models/modeling_phi4mm.py, `lora_config`, which is
    Phi-3 with encoders. tensorrt_llm/lora_manager.py, `load_from_hf`, skips a module that its mapping
    does not lead to a target module, and swaps gate and up in `preprocess_lora_weights`.
    """
    folder = write_checkpoint(tmp_path / "tiny", "phi3")
    packed = {"qkv_proj": (HIDDEN, 512), "o_proj": (HIDDEN, HIDDEN), "gate_up_proj": (HIDDEN, 1024)}
    adapter = write_adapter(tmp_path / "a", {**packed, "down_proj": (512, HIDDEN)})
    llmops("build", folder, "-o", tmp_path / "e", "--target", "pytorch", "--adapter", f"sql={adapter}", "--name", "x")
    config = EngineManifest.load(tmp_path / "e").extra.llm_args["lora_config"]
    assert config["trtllm_modules_to_hf_modules"] == {
        "attn_qkv": "qkv_proj", "attn_dense": "o_proj", "mlp_gate_up": "gate_up_proj", "mlp_4h_to_h": "down_proj",
    }  # fmt: skip
    assert set(config["lora_target_modules"]) == set(config["trtllm_modules_to_hf_modules"])
    assert config["swap_gate_up_proj_lora_b_weight"] is False


# -- The tokenizer file of guided decoding, held to what NVIDIA's script writes through transformers


def nvidias(folder: Path) -> dict:
    """NVIDIA/TensorRT-LLM examples/generate_xgrammar_tokenizer_info.py, in its own words: get_vocab() in the order of
    ids, the fast tokenizer's serialisation, the end-of-text token."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        "encoded_vocab": sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get),
        "tokenizer_str": tokenizer.backend_tokenizer.to_str(),
        "stop_token_ids": [tokenizer.eos_token_id],
    }


def test_it_is_what_nvidias_script_writes(engine_dir: Path) -> None:
    folder = engine_dir / "tokenizer"
    mine, theirs = tokenizer_info(folder / "tokenizer.json", [2]), nvidias(folder)
    # transformers fills in what tokenizer_config.json says of truncation and added tokens; the model is the same
    ours, others = (json.loads(one.pop("tokenizer_str")) for one in (mine, theirs))
    assert (ours["model"], ours["decoder"]) == (others["model"], others["decoder"])
    assert mine == theirs
