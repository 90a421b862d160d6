"""Tests that the contract of gateway and engines is defined once.

It is in llmops/contract.py, which travels with the models.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmops import contract
from llmops.gateway.interfaces import Capabilities, ModelMetadata
from llmops.model_repository.repository.pbtxt import parse_config
from llmops.model_repository.targets import find_target
from tests.model_repository.test_generate import make_engine
from tests.support.model_code import version_folder

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "model_repository"
TABLES = [table for table in vars(contract).values() if isinstance(table, contract.TensorList)]
NAMES = {tensor.name for table in TABLES for tensor in table} | {
    *(
        contract.PREPROCESSING_SUFFIX,
        contract.ENGINE_SUFFIX,
        contract.POSTPROCESSING_SUFFIX,
        contract.EMBEDDING_SUFFIX,
        contract.SCORE_SUFFIX,
    ),
    *(
        contract.METADATA_PARAMETER,
        contract.RUNTIME_PARAMETER,
        contract.EMPTY_FINAL_PARAMETER,
        contract.FINAL_RESPONSE_PARAMETER,
    ),
    *(contract.UNKNOWN_SUBSCRIPTION, contract.NO_REPLY_ID),
}
# where a contract's name can only mean the contract; elsewhere `seed` is a field of OpenAI, `input_ids` of transformers
SPEAKS = (
    "gateway/triton", "gateway/fleet", "model_repository", "perf/verify/contract", "perf/verify/probe.py",
    "perf/verify/engine_context.py", "perf/clients/triton.py", "tests/support/mock_engine",
)  # fmt: skip
# the same words in another language: file, words, whose they are
OTHERS = {
    "model_repository/tensorrt_llm/1/llmops_engine/guided/openvino.py": ("input_ids",),  # OpenVINO's graph
    "model_repository/embedding/1/model.py": ("input_ids", "token_type_ids"),  # OpenVINO's graph
    "model_repository/tensorrt_llm/1/llmops_engine/engine_runtime.py": ("stop",),  # why a sequence ended
    "gateway/routing/failover.py": ("drain",),  # why an answer moves
    # arguments of TensorRT-LLM's SamplingParams, and its finish reason
    "model_repository/tensorrt_llm/1/llmops_engine/runtimes/trtllm.py": (
        "embedding_bias", "stop", "max_tokens", "min_tokens", "end_id", "pad_id", "cache_salt",
    ),
    # fields of the executor's requests, and parameters of the C++ backend
    "model_repository/tensorrt_llm/1/llmops_engine/runtimes/executor.py": (
        "END_ID", "STOP_WORDS", "bad_words", "cache_salt_id", "embedding_bias", "end_id", "lora_config",
        "lookahead_ngram_size", "lookahead_verification_set_size", "lookahead_window_size", "max_tokens", "min_tokens",
        "pad_id", "stop_words", "streaming", "top_k", "top_p",
    ),
    # fields of a request to the LLM API, and parameters of the C++ backend
    "model_repository/doctor/probe_cases.py": (
        "lookahead_ngram_size", "lookahead_verification_set_size", "lookahead_window_size",
        "temperature", "top_p", "top_k", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "stop_words", "min_tokens",
    ),
    # capabilities
    "model_repository/tensorrt_llm/1/model.py": ("bad_words",),
    "model_repository/tensorrt_llm/1/llmops_engine/runtimes/trtllm_library.py": (
        "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_k", "temperature", "top_p",
    ),
    "model_repository/targets/openvino.py": ("bad_words", "cache_salt", "seed"),
    "model_repository/targets/pytorch.py": ("bad_words", "cache_salt", "seed"),
    # the C++ backend's parameters
    "model_repository/targets/tensorrt.py": (
        "bad_words", "cache_salt", "seed", "lookahead_window_size", "lookahead_ngram_size",
        "lookahead_verification_set_size",
    ),
    # fields of the card, parameters and engine.json of the tokenizer
    "model_repository/generate.py": ("pad_id", "embedding"),
    "model_repository/encoder.py": ("embedding", "score"),
    "model_repository/preprocessing/1/model.py": ("pad_id",),
    "perf/verify/contract/stopping.py": ("min_tokens",),  # the name of a check
}  # fmt: skip
# words that no other module uses, forbidden in every file
UNMISTAKABLE = {
    name
    for name in NAMES
    if name.startswith(("step_", "guided_decoding_guide", "runtime_", "output_log", "request_output", "triton_", "-"))
    or name.endswith(("_words_list", "_return_sequences"))
}  # fmt: skip


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a source but its docstrings, a text with values in it by what stands before the first."""
    tree = ast.parse(path.read_text())
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def said(text: str) -> str:
    """Return the name in a text, which is the text itself or precedes a statement.

    A statement reads `input_ids: at least …`.
    """
    if text in NAMES:
        return text
    name, colon, _ = text.partition(": ")
    return name if colon else ""


def sources() -> Iterator[tuple[str, Path]]:
    for folder in ("llmops", "gateway", "model_repository", "control", "perf", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != ROOT / "llmops" / "contract.py":
                yield path.relative_to(ROOT).as_posix(), path


def test_no_name_of_the_contract_is_written_anywhere_else() -> None:
    found = []
    for name, path in sources():
        wanted = NAMES - set(OTHERS.get(name, ())) if name.startswith(SPEAKS) else UNMISTAKABLE
        found += [f"{name}:{line} {text!r}" for line, text in literals(path) if said(text) in wanted]
    assert found == []


def test_a_name_that_is_written_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""temperature"""\nx = f"input_ids: {y} is wrong"\nz = "seed"\n')
    assert [(line, said(text)) for line, text in literals(tmp_path / "a.py") if said(text) in NAMES] == [
        (3, "seed"),
        (2, "input_ids"),
    ]


def test_what_other_languages_share_is_still_there() -> None:
    for name, words in OTHERS.items():
        texts = {text for _, text in literals(ROOT / name)}
        assert set(words) - texts == set(), name


def test_verify_asks_for_inputs_that_there_are() -> None:
    """`desk.same(…, runtime_top_p=1.5)`: its keywords are inputs, or its own."""
    inputs = {tensor.name for tensor in contract.PYTHON_ENGINE_INPUTS} | {"on_response", "greedy", "request_id"}
    for path in sorted((ROOT / "perf" / "verify").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("same", "ask")
            ):
                assert {one.arg for one in node.keywords if one.arg} <= inputs, f"{path}:{node.lineno}"


def test_it_needs_nothing_that_an_image_may_lack() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(sorted(n for n in sys.modules if 'llmops' in n))"
    path = version_folder("tensorrt_llm") / "llmops_contract.py"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code, path], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    assert path.read_bytes() == Path(contract.__file__).read_bytes()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[0].name)
def test_a_table_has_each_name_once(table: contract.TensorList) -> None:
    assert len({tensor.name for tensor in table}) == len(table)
    for tensor in table:
        assert not (tensor.taken and tensor.neutral), f"{tensor} is read or passed over, not both"
        assert not tensor.needs or tensor.needs in contract.CAPABILITIES


def test_card_and_capabilities_have_the_same_fields_on_both_sides(tmp_path: Path) -> None:
    from llmops.model_repository.generate import model_folders, read_engines

    (entry,) = read_engines([str(make_engine(tmp_path / "engine"))])
    (text,) = [one.config for one in model_folders(entry) if one.name.endswith(contract.ENGINE_SUFFIX)]
    card = json.loads(parse_config(text, "x").parameters[contract.METADATA_PARAMETER].string_value)
    assert list(card) == list(contract.METADATA_FIELDS)
    assert set(ModelMetadata.__dataclass_fields__) - {"extra"} == set(contract.METADATA_FIELDS) - {"contract"}
    assert set(Capabilities.__dataclass_fields__) == set(contract.CAPABILITIES)
    assert set(find_target("openvino").capabilities(entry.manifest)) == set(contract.CAPABILITIES)


# what each model's image has; numpy comes with Triton's Python backend
ALLOWED = {
    "tensorrt_llm": {
        "llmops_engine",
        "llmops_kv_blocks",
        "llmops_process",
        "llmops_contract",
        "llmops_round_robin",
        "xxhash",
        "openvino",
        "openvino_genai",
        "torch",  # of TensorRT-LLM's own Python
        "tensorrt_llm",
        "tokenizers",
    },
    "preprocessing": {"llmops_preprocessing", "llmops_contract", "tokenizers"},
    "postprocessing": {"llmops_postprocessing", "llmops_contract", "tokenizers"},
    "embedding": {"llmops_contract", "openvino"},
}
LIBRARIES = {"openvino.py", "model.py", "sandbox.py", "trtllm_library.py"}


@pytest.mark.parametrize("package", ALLOWED)
def test_what_runs_inside_triton_imports_only_what_is_there(package: str) -> None:
    known = sys.stdlib_module_names | {"numpy", "triton_python_backend_utils"} | ALLOWED[package]
    paths = [*(MODELS / package / "1").rglob("*.py")]
    if package == "tensorrt_llm":
        paths += (ROOT / "tests" / "support" / "mock_engine" / "llmops_engine").rglob("*.py")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            roots = {name.partition(".")[0] for name in names}
            assert roots <= known, f"{path}:{getattr(node, 'lineno', 0)}"
            # the runtimes' libraries are loaded by their own module alone
            assert not roots & {"openvino", "openvino_genai", "tensorrt_llm"} or path.name in LIBRARIES, path


# triton_backend/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt of NVIDIA/TensorRT-LLM at 0c8de69
NVIDIA_SCALARS = {
    "INT32": "encoder_output_lengths input_lengths request_output_len num_return_sequences decoder_input_lengths "
    "end_id pad_id beam_width runtime_top_k runtime_top_p_reset_ids min_tokens prompt_vocab_size",
    "FP32": "draft_acceptance_threshold temperature runtime_top_p runtime_top_p_min runtime_top_p_decay len_penalty "
    "repetition_penalty beam_search_diversity_rate presence_penalty frequency_penalty",
    "BOOL": "early_stopping return_log_probs return_context_logits return_generation_logits return_perf_metrics "
    "return_num_input_tokens return_num_output_tokens exclude_input_in_output stop streaming",
    "UINT64": "seed lora_task_id",
}
NVIDIA_RAGGED = {
    (-1,): "input_ids draft_input_ids decoder_input_ids embedding_bias prompt_table_extra_ids context_phase_params "
    "retention_token_range_starts retention_token_range_ends retention_token_range_priorities "
    "retention_token_range_durations_ms",
    (-1, -1): "encoder_input_features draft_logits prompt_embedding_table cross_attention_mask lora_weights",
    (2, -1): "stop_words_list bad_words_list",
    (-1, 3): "lora_config",
    (1,): "skip_cross_attn_blocks retention_decode_priority retention_decode_duration_ms guided_decoding_guide_type "
    "guided_decoding_guide lookahead_window_size lookahead_ngram_size lookahead_verification_set_size",
}
NVIDIA_PLAIN = {(-1,): "mrope_rotary_cos_sin", (1,): "mrope_position_deltas"}
NVIDIA_OUTPUTS = {
    (-1,): "sequence_length cum_log_probs context_phase_params",
    (-1, -1): "output_ids output_log_probs context_logits",
    (-1, -1, -1): "generation_logits",
    (1,): "batch_index sequence_index kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks "
    "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate "
    "total_accepted_draft_tokens total_draft_tokens num_input_tokens num_output_tokens",
}


def by_name(table: dict) -> dict:
    return {name: key for key, names in table.items() for name in names.split()}


def test_the_engine_model_is_declared_as_nvidias_is() -> None:
    inputs = contract.ENGINE_INPUTS
    assert {one.name: one.datatype for one in inputs if one.scalar} == by_name(NVIDIA_SCALARS)
    assert {one.dims for one in inputs if one.scalar} == {(1,)}
    assert {one.name: one.dims for one in inputs if one.ragged} == by_name(NVIDIA_RAGGED)
    assert {one.name: one.dims for one in inputs if not one.ragged and not one.scalar} == by_name(NVIDIA_PLAIN)
    assert {one.name for one in inputs if not one.optional} == {"input_lengths", "request_output_len"}
    assert {one.name: one.dims for one in contract.ENGINE_OUTPUTS} == by_name(NVIDIA_OUTPUTS)
