"""The generated repository: NVIDIA's names and types, all or nothing, one clear sentence for what cannot be served."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmops.build.engine_folder.manifest import TokenizerInfo
from llmops.build.engine_folder.manifest_extras import EncoderExtra, OpenVinoExtra
from llmops.errors import InputError, ResourceError, VersionMismatchError
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.repository.pbtxt import parse_config, quote
from llmops.model_repository.repository.validation import check_repository
from llmops.output_files import check_writable, write_text
from tests.support.manifests import engine_manifest


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine(tmp_path / "engine")


def make_engine(directory: Path, name: str = "tiny", **changes: Any) -> Path:
    """An engine folder as far as `repo` looks at it; no weights."""
    for path in ("model/openvino_model.xml", "model/openvino_model.bin", "tokenizer/tokenizer.json"):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).touch()
    tokenizer = {"vocab_size": 100, "bos_id": 1, "end_ids": [2, 3], "pad_id": None, "chat_template": True}
    engine_manifest("openvino", name=name, tokenizer=tokenizer).model_copy(update=changes).save(directory)
    return directory


def configs(repository: Path) -> dict[str, Any]:
    return {path.parent.name: parse_config(path.read_text(), str(path)) for path in repository.glob("*/config.pbtxt")}


def test_a_model_without_end_tokens_gets_a_repository(tmp_path: Path) -> None:
    """Before the fix, this ended with a traceback."""
    tokenizer = {"vocab_size": 100, "end_ids": [], "chat_template": False}
    entries = read_engines([str(make_engine(tmp_path / "engine", tokenizer=TokenizerInfo.model_validate(tokenizer)))])
    generate_repository(entries, tmp_path / "repository")
    assert configs(tmp_path / "repository")["tiny-preprocessing"].parameters["pad_id"].string_value == "0"


def test_a_served_name_becomes_four_models_with_nvidias_tensors(engine: Path, tmp_path: Path) -> None:
    output = tmp_path / "repository"
    names = generate_repository(read_engines([str(engine)]), output)
    assert names == ["tiny", "tiny-preprocessing", "tiny-tensorrt_llm", "tiny-postprocessing"]
    assert sorted(check_repository(output)) == sorted(names)
    models = configs(output)
    assert {name: model.max_batch_size for name, model in models.items()} == dict.fromkeys(names, 8)
    assert models["tiny-tensorrt_llm"].model_transaction_policy.decoupled
    assert models["tiny-preprocessing"].parameters["logit_bias"].string_value == "false"
    for model, inputs in REQUIRED.items():
        found = {tensor.name for tensor in models[f"tiny{model}"].input if not tensor.optional}
        assert found == inputs, model


# Facts about TensorRT-LLM's inflight_batcher_llm repository, written down independently of tensors.py.
REQUIRED = {
    "": {"text_input", "max_tokens"},
    "-preprocessing": {"QUERY", "REQUEST_OUTPUT_LEN"},
    "-tensorrt_llm": {"input_lengths", "request_output_len"},
    "-postprocessing": {"TOKENS_BATCH", "SEQUENCE_LENGTH"},
}


def test_every_step_of_the_ensemble_fits_the_model_it_calls(engine: Path, tmp_path: Path) -> None:
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    models = configs(tmp_path / "r")
    steps = models["tiny"].ensemble_scheduling.step
    produced = {tensor.name for tensor in models["tiny"].input}
    for step in steps:
        called = models[step.model_name]
        inputs = {tensor.name: tensor for tensor in called.input}
        assert set(step.input_map) <= set(inputs)
        assert {name for name, tensor in inputs.items() if not tensor.optional} <= set(step.input_map)
        assert set(step.output_map) <= {tensor.name for tensor in called.output}
        assert set(step.input_map.values()) <= produced, step.model_name
        produced |= set(step.output_map.values())
    assert {tensor.name for tensor in models["tiny"].output} <= produced


def test_the_ensemble_keeps_the_order_of_a_stream(engine: Path, tmp_path: Path) -> None:
    """Ensembles hand the responses of other models to a pool of threads, from Triton 25.06 on (core,
    src/ensemble_scheduler/ensemble_scheduler.cc, preserve_responses_order).
    """
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    models = configs(tmp_path / "r")
    for name in ("tiny-tensorrt_llm", "tiny-postprocessing"):
        model = models[name]
        alone = not model.HasField("dynamic_batching") and sum(group.count for group in model.instance_group) == 1
        assert alone or model.dynamic_batching.preserve_ordering or model.model_transaction_policy.decoupled, name


def test_the_card_says_what_the_gateway_must_know(engine: Path, tmp_path: Path) -> None:
    generate_repository(read_engines([f"chat={engine}"]), tmp_path / "r")
    config = configs(tmp_path / "r")["chat-tensorrt_llm"]
    card = json.loads(config.parameters["llmops_model_metadata"].string_value)
    assert card["contract"] == 2
    assert (card["name"], card["target"], card["end_ids"], card["pad_id"]) == ("chat", "openvino", [2, 3], None)
    assert (card["max_batch_size"], card["max_seq_len"], card["vocab_size"]) == (8, 512, 100)
    assert Path(card["tokenizer_dir"]) == engine.resolve() / "tokenizer"
    assert "request" in card["transports"]
    assert (card["capabilities"]["top_logprobs"], card["sampling"]) == (0, {})


@pytest.mark.parametrize(("said", "apart"), [(None, False), (True, True), (False, False)])
def test_engines_for_tenants_apart_start_without_the_cache_that_they_would_give_up(tmp_path, said, apart) -> None:
    """Giving it up compiles the model again: a new replica stood still for 10 s with its first request."""
    given = {} if said is None else {"prefix_cache": said}
    engine = make_engine(tmp_path / "engine", extra=OpenVinoExtra.model_validate({"openvino": given}))

    def cache(tenants_apart: bool) -> bool | None:
        generate_repository(read_engines([str(engine)], tenants_apart=tenants_apart), tmp_path / "r")
        config = configs(tmp_path / "r")["tiny-tensorrt_llm"]
        return json.loads(config.parameters["openvino"].string_value).get("prefix_cache")

    assert cache(tenants_apart=False) is said
    assert cache(tenants_apart=True) is apart


def test_encoders_have_no_cache_to_start_without(tmp_path) -> None:
    extra = EncoderExtra.model_validate({"embedding": {"dimensions": 4, "pooling": "mean", "normalised": True}})
    engine = make_engine(tmp_path / "engine", extra=extra)
    made = [read_engines([str(engine)], tenants_apart=apart)[0].manifest for apart in (False, True)]
    assert made[0] == made[1]


def test_a_repository_is_replaced_as_a_whole(engine: Path, tmp_path: Path) -> None:
    output = tmp_path / "r"
    generate_repository(read_engines([f"a={engine}", f"b={engine}"]), output)
    generate_repository(read_engines([f"a={engine}"]), output)
    assert list(check_repository(output)) == ["a", "a-postprocessing", "a-preprocessing", "a-tensorrt_llm"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_rest_of_a_killed_process_is_removed(engine, tmp_path) -> None:
    (tmp_path / ".r.01234567.building" / "other" / "1").mkdir(parents=True)
    generate_repository(read_engines([f"a={engine}"]), tmp_path / "r")
    assert "other" not in check_repository(tmp_path / "r")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["r.json", "r"])
def test_a_link_that_another_user_plants_is_not_followed(name, engine, tmp_path) -> None:
    """Before the fix, the name held only the process id, so others knew it and got what was written."""
    (tmp_path / "theirs").mkdir()
    for suffix in ("new", "part"):
        (tmp_path / f".{name}.{os.getpid()}.{suffix}").symlink_to(tmp_path / "theirs")
    if name == "r":
        generate_repository(read_engines([f"a={engine}"]), tmp_path / name)
    else:
        (tmp_path / f".{name}.{os.getpid()}.part").unlink()
        (tmp_path / f".{name}.{os.getpid()}.part").symlink_to(tmp_path / "theirs" / "file")
        check_writable(tmp_path / name)
        write_text(tmp_path / name, "{}")
    assert (tmp_path / name).exists()
    assert not (tmp_path / name).is_symlink()
    assert list((tmp_path / "theirs").iterdir()) == []


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_as_a_parameter(text: str) -> None:
    config = parse_config(f'parameters {{ key: "k" value {{ string_value: {quote(text)} }} }}', "x")
    assert config.parameters["k"].string_value == text


def test_a_folder_with_other_files_is_left_alone(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        generate_repository(read_engines([str(engine)]), tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.txt"]
    # nor are files beside the models of a repository, which were removed with it
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    (tmp_path / "r/thesis.txt").write_text("mine")
    with pytest.raises(ResourceError, match=r"would remove: thesis\.txt"):
        generate_repository(read_engines([str(engine)]), tmp_path / "r")
    assert (tmp_path / "r/thesis.txt").read_text() == "mine"
    (marker := tmp_path / "r/.llmops-repository.json").write_text("{}")
    with pytest.raises(ResourceError, match=r"would remove: thesis\.txt"):
        generate_repository(read_engines([str(engine)]), tmp_path / "r")
    (tmp_path / "r/thesis.txt").unlink()
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    assert marker.read_text() != "{}"
    (warmup := next(path for path in (tmp_path / "r").iterdir() if path.is_dir()) / "warmup").mkdir()
    (warmup / "prompt").write_text("mine")
    with pytest.raises(ResourceError, match=r"would remove: .*/warmup/prompt"):
        generate_repository(read_engines([str(engine)]), tmp_path / "r")


def test_byte_code_in_a_repository_of_an_earlier_version_is_replaced(engine: Path, tmp_path: Path) -> None:
    """Before the fix, `llmops up` stopped with a cached repository that an earlier version had served."""
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    for sentinel in (tmp_path / "r").rglob("__pycache__"):
        sentinel.unlink()
        sentinel.mkdir()
        (sentinel / "model.cpython-312.pyc").touch()
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    assert not list((tmp_path / "r").rglob("*.pyc"))


NEWER = {"versions": {"openvino": "2099.1.0"}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": "a/b"}, InputError, "cannot name a model"),
        ({"complete": False}, InputError, "is not complete"),
        (NEWER, VersionMismatchError, r"built with OpenVINO 2099.1.0, but .* is installed"),
        ({"format": 99}, InputError, "written by another version"),
    ],
)
def test_engines_that_cannot_be_served(tmp_path: Path, changes: dict, error: type[Exception], message: str) -> None:
    pytest.importorskip("openvino")
    engine = make_engine(tmp_path / "engine", **changes)
    with pytest.raises(error, match=message):
        read_engines([str(engine)])


@pytest.mark.parametrize("missing", ["model/openvino_model.bin", "tokenizer/tokenizer.json", "engine.json"])
def test_a_damaged_engine_is_named(engine: Path, missing: str) -> None:
    (engine / missing).unlink()
    with pytest.raises(InputError, match=Path(missing).name.split(".")[0]):
        read_engines([str(engine)])


EDITS = {
    "not protobuf": (lambda d: (d / "config.pbtxt").write_text("name: ]["), "not a Triton model configuration"),
    "unknown field": (lambda d: (d / "config.pbtxt").write_text("nmae: 'x'"), "nmae"),
    "other name": (lambda d: (d / "config.pbtxt").write_text('name: "x"'), "the folder is tiny-tensorrt_llm"),
    "no config": (lambda d: (d / "config.pbtxt").unlink(), "no config.pbtxt"),
    "no code": (lambda d: (d / "1" / "model.py").unlink(), "model.py is missing"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_repository_is_noticed_before_the_server_starts(engine: Path, tmp_path: Path, edit: str) -> None:
    generate_repository(read_engines([str(engine)]), tmp_path / "r")
    change, message = EDITS[edit]
    change(tmp_path / "r" / "tiny-tensorrt_llm")
    with pytest.raises(InputError, match=message):
        check_repository(tmp_path / "r")
