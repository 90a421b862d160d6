"""Checkpoints from somebody who wants to read a file of the builder, or to use up its time and memory."""

import base64
import contextlib
import json
import math
import os
import pickle
import resource
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmops.build.checkpoint import Checkpoint, open_checkpoint
from llmops.build.checkpoint.chat_template import render_messages
from llmops.build.checkpoint.file_checks import reject_changed_files, reject_outside_symlinks
from llmops.build.checkpoint.gguf_header import read_header
from llmops.build.checkpoint.hashing import sha256_of
from llmops.build.checkpoint.hub_download import cached_config, check_cache, fetch_config, fetch_snapshot
from llmops.build.checkpoint.huggingface_folder import open_folder
from llmops.build.checkpoint.known_models import bundled_file, bundled_path
from llmops.build.checkpoint.safetensors_header import read_header as read_safetensors
from llmops.build.checkpoint.weight_sources import open_weights
from llmops.build.encoder.encoder_checkpoint import BUNDLED, is_encoder, open_encoder
from llmops.build.job.build_engine import build, open_model, prepare
from llmops.build.progress import SilentProgress
from llmops.build.quantize.model_loading import empty_model, load_model, read_hf_config, source_config
from llmops.build.spec import BuildSpec
from llmops.build.targets.pytorch import _link_checkpoint
from llmops.build.tokenizer import check_tokenizer, tokenizer_trial, write_tokenizer
from llmops.build.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llmops.build.tokenizer.tokenizer_trial import try_tokenizer
from llmops.errors import CheckpointError, InputError, ResourceError
from llmops.gateway.api.moderations import text_embedder
from llmops.gateway.errors import InvalidRequestError
from llmops.gateway.text.chat_template import ChatTemplate
from llmops.gateway.text.text_thread_pool import TextThreadPool
from llmops.gateway.text.tokenizer import TextTokenizer
from llmops.tokenizer_files import check_growth
from llmops.tokenizer_patterns import are_quick
from tests.attacks.harness import MIB, max_cost, record, scaled
from tests.support import forked_cli
from tests.support.tiny_models import write_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
    "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_STRING, _ARRAY, _UINT8 = 8, 9, 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return shutil.copytree(bundled_file("minilm", BUNDLED["minilm"], "model.safetensors").parent, tmp_path / "encoder")


@pytest.fixture
def tokenizer(tmp_path: Path, tokenizer_dir: Path) -> Path:
    """The file of a tokenizer in a folder of its own."""
    return shutil.copytree(tokenizer_dir, tmp_path / "t") / "tokenizer.json"


def rewrite(file: Path, **changes: object) -> None:
    """Change these entries of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_link_to_another_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "inner").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="a link inner that leads out"):
        open_folder(folder, "x", weights=False)


def test_a_link_to_another_gguf_or_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    """Before the fix, a build took the other model, and the settings of an encoder were read before the check."""
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    rewrite(tmp_path / "config.json", architectures=["BertModel"])
    assert not is_encoder(str(folder))
    (folder / "config.json").unlink()
    gguf(tmp_path / "a.gguf", [])
    (folder / "a.gguf").symlink_to(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"a link a\.gguf that leads out of the folder"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("entries", [1, 400_000])
def test_an_older_tokenizer_is_converted_in_a_process_of_its_own(folder: Path, tmp_path: Path, entries: int) -> None:
    """Before the fix, a vocabulary of 43 MiB took the build 1.2 GB, and no time was too long for a conversion."""
    pytest.importorskip("transformers")
    rewrite(folder / "config.json", vocab_size=10**6)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    letters = [chr(letter) for letter in range(33, 127)]
    vocabulary = {text: at for at, text in enumerate([*letters, *map(str, range(10, entries))])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + ("a missing\n" if entries > 1 else ""))
    refused = pytest.raises(CheckpointError, match=r"cannot be converted \(.* out of vocabulary")
    with small(), refused if entries > 1 else contextlib.nullcontext():
        write_tokenizer(open_folder(folder, "x", weights=False), tmp_path / "t", print)


class Swapper(SilentProgress):
    """Replaces a file by a link to a secret while the build reads the checkpoint, and puts it back."""

    def __init__(self, file: Path, secret: Path) -> None:
        super().__init__()
        self._file, self._aside, self._secret = file, file.with_name("aside"), secret

    @contextlib.contextmanager
    def stage(self, title: str, total: float | None = None) -> Iterator[None]:
        swaps = title == "Writing the tokenizer"
        if swaps:
            self._file.rename(self._aside)
            self._file.symlink_to(self._secret)
        yield
        if swaps:
            self._aside.replace(self._file)


def test_a_link_that_is_there_only_while_the_build_reads(encoder: Path, tmp_path: Path) -> None:
    secret, output = tmp_path / "secret.json", tmp_path / "engine"
    shutil.copy(encoder / "tokenizer.json", secret)
    rewrite(secret, secret="7f3a91")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json was changed while the engine was built"):
        build(BuildSpec(str(encoder), output), Swapper(encoder / "tokenizer.json", secret))
    assert not output.exists()


def reopen(source: Checkpoint, target: Path) -> None:
    open_checkpoint(str(source.path))


def write(source: Checkpoint, target: Path) -> None:
    write_tokenizer(source, target, print)


def weights(source: Checkpoint, target: Path) -> None:
    open_weights(source)


def load(source: Checkpoint, target: Path) -> None:
    pytest.importorskip("transformers")
    load_model(source)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("chat_template.jinja", reopen), ("config.json", reopen), ("config.json", load), ("tokenizer.json", write),
        ("model.safetensors", weights), ("model.safetensors", _link_checkpoint), ("config.json", _link_checkpoint),
    ],
)  # fmt: skip
def test_a_folder_that_is_another_only_while_the_build_reads(tmp_path, monkeypatch, name, read):
    """Before the fix, an engine got a file that only the builder may read: the files themselves had not changed."""
    folder, twin, secret = write_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "twin", tmp_path / "secret"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    source = open_checkpoint(str(folder))
    twin.mkdir()
    for file in folder.iterdir():
        (twin / file.name).hardlink_to(file)
    (twin / name).unlink()
    shutil.copy(folder / name, secret)
    (twin / name).symlink_to(secret)
    states = source.states

    def swap(*checked: object) -> dict:
        if twin.exists():
            folder.rename(tmp_path / "aside")
            twin.rename(folder)
        return states

    monkeypatch.setattr("llmops.build.checkpoint.huggingface_folder.reject_outside_symlinks", swap)
    monkeypatch.setattr("llmops.build.targets.pytorch.reject_changed_files", swap)
    if read in (write, weights, load):
        swap()
    with pytest.raises(CheckpointError, match=f"{name} was changed while the engine was built"):
        read(source, tmp_path / "target")


def test_a_model_has_the_sampling_that_was_checked(tmp_path: Path) -> None:
    """Before the fix, transformers opened the file again and wrote all its fields into a quantised engine."""
    pytest.importorskip("transformers")
    file = write_checkpoint(tmp_path / "checkpoint", "llama") / "generation_config.json"
    for before in ('{"temperature": 0.5, "eos_token_id": 2}', None):
        file.unlink(missing_ok=True)
        if before:
            file.write_text(before)
        source = open_checkpoint(str(file.parent))
        file.write_text('{"temperature": 0.7, "secret": "7f3a91"}')
        found = load_model(source).generation_config.to_dict()
        assert "secret" not in found
        assert found["temperature"] == (0.5 if before else None)


def test_another_builds_link_to_a_file_is_no_change(folder: Path, tmp_path: Path) -> None:
    """An engine of unchanged weights links them, and ended all builds of the checkpoint beside it."""
    file = folder / "config.json"
    states, digests = reject_outside_symlinks(folder), {"config.json": sha256_of(file)}
    refused = pytest.raises(CheckpointError, match=r"config\.json was changed while the engine was built")
    time.sleep(0.02)  # times of files are ticks of the kernel
    (tmp_path / "engine").hardlink_to(file)
    reject_changed_files(folder, states, digests)
    (tmp_path / "engine").unlink()
    reject_changed_files(folder, states, digests)
    with refused:
        reject_changed_files(folder, states, {"config.json": None})
    file.rename(folder / "aside").rename(file)
    with refused:
        reject_changed_files(folder, states, digests)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_weights_changed_in_place_with_their_time_put_back(tmp_path: Path, kind: str) -> None:
    """Before the fix, engine.json had the SHA-256 of other weights than the engine; a GGUF was never checked."""
    if kind == "gguf":
        weights = source = Path(shutil.copy(bundled_path("smollm2"), tmp_path / "model.gguf"))
    else:
        source = write_checkpoint(tmp_path / "checkpoint", "llama")
        weights = source / "model.safetensors"
    job = prepare(BuildSpec(str(source), tmp_path / "engine"), open_model(str(source)))
    recorded = {file.path: file.sha256 for file in job.checkpoint.source().files}[weights.name]
    job.reject_changed_inputs()
    time.sleep(0.02)  # times of files are ticks of the kernel
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"changed")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=f"model.{kind} was changed while the engine was built"):
        job.reject_changed_inputs()
    assert sha256_of(weights) != recorded, "the cached digest of the weights before is not used"


def test_a_template_that_is_other_only_while_the_build_reads(tmp_path: Path) -> None:
    """Before the fix, an engine got a template or tokenizer that was put back with its time."""
    source = write_checkpoint(tmp_path / "checkpoint", "llama")
    file = source / "tokenizer_config.json"
    job = prepare(BuildSpec(str(source), tmp_path / "engine"), open_model(str(source)))
    job.checkpoint.source()
    time.sleep(0.02)  # times of files are ticks of the kernel
    whole, before = file.read_bytes(), file.stat()
    for content in (b"{}", whole):
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json was changed while the engine was built"):
        job.reject_changed_inputs()


@pytest.mark.parametrize("left", [0, 4096])
def test_weights_that_are_cut_after_they_were_checked(tmp_path: Path, left: int) -> None:
    """Before the fix, a build ended with a traceback."""
    source = write_checkpoint(tmp_path / "checkpoint", "llama")
    checkpoint = open_checkpoint(str(source))
    os.truncate(source / "model.safetensors", left)
    with pytest.raises(CheckpointError, match=r"model\.safetensors (was truncated|is empty)"):
        open_weights(checkpoint).get("model.norm.weight")


@pytest.mark.parametrize("named", ["../../private", "{absolute}", ".", "..", "link"])
def test_the_hubs_cache_names_no_folder_outside(folder, tmp_path, monkeypatch, named):
    """A cache of somebody else made an engine of a folder that only the builder may read."""
    model = tmp_path / "models--a--b"
    (model / "refs").mkdir(parents=True)
    (model / "snapshots").mkdir()
    private = folder.rename(tmp_path / "private")
    (model / "snapshots" / "link").symlink_to(private)
    (model / "refs" / "main").write_text(named.format(absolute=private))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("llmops.build.checkpoint.hub_download._unreachable", lambda: True)
    for read in (fetch_snapshot, fetch_config, cached_config):
        with contextlib.suppress(CheckpointError, ResourceError):
            assert read("a/b") is None


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a hole", "a path"])
@pytest.mark.parametrize("record", ["refs/main", "trees/0123.json"])
def test_the_hubs_records_are_files_of_bounded_size(record, kind, folder, tmp_path, monkeypatch):
    """Before the fix, a pipe ended no build, and a device and a hole filled its memory."""
    model = tmp_path / "models--a--b"
    (model / "snapshots").mkdir(parents=True)
    folder.rename(model / "snapshots" / "0123")
    for path, text in (("refs/main", "0123"), ("trees/0123.json", "{}")):
        (model / path).parent.mkdir()
        (model / path).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("llmops.build.checkpoint.hub_download._unreachable", lambda: True)
    assert cached_config("a/b") is not None
    path = model / record
    if kind == "a hole":
        os.truncate(path, 3 << 30)
    elif kind == "a path":
        path = model / "refs/main"
        path.write_text("../snapshots/0123")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "a pipe" else path.symlink_to("/dev/zero")
    for read in (fetch_snapshot, fetch_config, cached_config):
        with pytest.raises(CheckpointError, match="by a record that is no file"):
            read("a/b")


@pytest.mark.parametrize("name", ["token", "stored_tokens", ".agent_harnesses.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a hole"])
def test_the_hubs_tokens_are_files_of_bounded_size(name, kind, tmp_path, monkeypatch):
    """Before the fix, a pipe ended no build, and a device and a hole filled its memory."""
    (tmp_path / "token").write_text("hf_a")
    path = tmp_path / name
    for constant, file in (("TOKEN", "token"), ("STORED_TOKENS", "stored_tokens")):
        monkeypatch.setattr(f"huggingface_hub.constants.HF_{constant}_PATH", str(tmp_path / file))
    harnesses = str(tmp_path / ".agent_harnesses.json")
    monkeypatch.setattr("huggingface_hub.constants.AGENT_HARNESSES_PATH", harnesses, raising=False)
    check_cache("a/b")
    path.unlink(missing_ok=True)
    if kind == "a hole":
        path.touch()
        os.truncate(path, 3 << 30)
    else:
        os.mkfifo(path) if kind == "a pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name} is no file or is too large"):
        fetch_config("a/b")


def test_the_hubs_cache_is_read(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/main", "blobs"))
    for made in (snapshot, blobs):
        made.mkdir(parents=True)
    (blobs / "0123").write_text(json.dumps(CONFIG))
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    assert open_folder(snapshot, "a/b", weights=False).config["vocab_size"] == 8


PARTS = st.sampled_from(["..", "checkpoint", "inner", "secret", "self", "config.json"])


@given(st.lists(PARTS, min_size=1, max_size=5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_links_that_stay_inside_pass(tmp_path: Path, parts: list[str]) -> None:
    folder = tmp_path / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "secret").write_text("the builder's own file")
    link = folder / "self"
    link.symlink_to(Path(*parts))
    try:
        reject_outside_symlinks(folder)
    except (CheckpointError, OSError, RuntimeError):
        return
    assert link.resolve().is_relative_to(folder.resolve())


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(path: Path, pairs: list[bytes], size: int = 0) -> Path:
    """Write a header with these metadata entries; with `size`, a hole follows up to so many bytes."""
    with path.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + b"".join(pairs))
        file.truncate(max(size, file.tell()))
    return path


#: A block may take 96 MiB and 5 CPU seconds.
small = partial(max_cost, 96, 5, time.thread_time)


@pytest.mark.parametrize("kind", [_UINT8, _STRING])
@pytest.mark.parametrize("key", ["a.list", "tokenizer.ggml.scores"])
def test_a_list_in_a_hole(tmp_path: Path, kind: int, key: str) -> None:
    count = scaled(100, 200) * MIB
    pair = text(key) + struct.pack("<IIQ", _ARRAY, kind, count // (8 if kind == _STRING else 1))
    path = gguf(tmp_path / "a.gguf", [pair], size=count + 4096)
    assert path.stat().st_blocks * 512 < 64 * 1024
    with small(), contextlib.suppress(CheckpointError):
        read_header(path)


def test_counts_without_end(tmp_path: Path) -> None:
    for pairs in (1 << 40, 1 << 15):
        path = gguf(tmp_path / "a.gguf", [], size=scaled(50, 200) * MIB)
        with path.open("r+b") as file:
            file.seek(16)
            file.write(struct.pack("<Q", pairs))
        with small(), contextlib.suppress(CheckpointError):
            read_header(path)


def test_one_token_that_is_a_book() -> None:
    """Before the fix, 240,000 characters took 26 s."""
    fields = {"model": "llama", "tokens": ["<unk>", "a", "a" * scaled(120_000, 240_000)], "scores": [0.0, 0.0, 0.0]}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    with small(), contextlib.suppress(CheckpointError):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than"),
    ],
)
def test_a_template_that_fails_is_one_sentence(tmp_path: Path, template: str, why: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises((ValueError, CheckpointError), match=f"chat template .*({why})") as refusal:
        render_messages(tmp_path, ["a"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("repeated", [200, 3500])
def test_a_template_that_writes_a_long_prompt(tmp_path: Path, repeated: int) -> None:
    """Before the fix, a build took more than 2 GB for 3,500 lines, and failed to allocate 80 GB for 25,000."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", max_position_embeddings=8192)
    (checkpoint / "chat_template.jinja").write_text(f"{{{{ ('a '*{repeated})|wordwrap(1) }}}}")
    progress = SilentProgress()
    with max_cost(256, 5, time.thread_time):  # OpenVINO's library is a part of it
        build(BuildSpec(str(checkpoint), tmp_path / "engine"), progress)
    assert any("a short message has" in note for note in progress.notes) == (repeated > 200)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to(path)], ids=["pipe", "loop"])
def test_what_is_no_file_is_refused(folder: Path, put: Callable[[Path], None]) -> None:
    """Before the fixes, a build waited for ever for the pipe, and a loop of links ended with a traceback."""
    put(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a pipe or a device|leads out of the folder"):
        open_folder(folder, "x")


NAMES = ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_hole_of_three_gigabytes(folder: Path, name: str) -> None:
    """Before the fix, each took 3.3 to 6.2 GB."""
    (folder / name).touch()
    os.truncate(folder / name, 3 << 30)
    with small(), pytest.raises(CheckpointError, match=r"bytes, and at most .* are read"):
        open_folder(folder, "x", weights=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_hole_in_an_encoder(folder: Path, name: str) -> None:
    """Before the fix, a build wrote 3 GB for a folder of a few KB: a larger hole fills the disk."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]}))
    (folder / name).touch()
    os.truncate(folder / name, 3 << 30)
    with pytest.raises(CheckpointError, match=r"bytes, and at most .* are read"):
        open_encoder(str(folder))


@pytest.mark.parametrize(
    "change",
    [{"pad_token_id": "x"}, {"max_position_embeddings": [1]}, {"hidden_size": 10**400}, {"hidden_size": 10**9},
     {"hidden_size": 385}, {"max_position_embeddings": -5},
     {"num_hidden_layers": "x"}, {"num_attention_heads": -1}, {"vocab_size": {}}, {"layer_norm_eps": None},
     {"layer_norm_eps": math.nan}, {"layer_norm_eps": -1}],
)  # fmt: skip
def test_odd_settings_of_an_encoder_are_one_sentence(encoder: Path, change: dict[str, object]) -> None:
    """Before the fix, each of them ended the build with a traceback."""
    rewrite(encoder / "config.json", **change)
    with pytest.raises(CheckpointError, match="download it again"):
        build(BuildSpec(str(encoder), encoder.parent / "engine"), SilentProgress())


def test_an_encoder_reads_no_more_tokens_than_it_has_positions(encoder: Path) -> None:
    """Before the fix, an engine took texts of 100,000 tokens, whose attention fills any memory."""
    (encoder / "sentence_bert_config.json").unlink()
    rewrite(encoder / "config.json", max_position_embeddings=100_000)
    opened = open_encoder(str(encoder))
    assert opened is not None
    assert opened.max_seq_len == 512


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "final_logit_softcapping"])
@pytest.mark.parametrize("value", ["x", [1], math.nan, math.inf, -1e-5, 10**400, True], ids=str)
def test_odd_numbers_of_a_decoder_are_one_sentence(folder: Path, name: str, value: object) -> None:
    """Before the fix, a text was a traceback of the build, and NaN was a model that answers nothing."""
    rewrite(folder / "config.json", **{name: value})
    with pytest.raises(CheckpointError, match=f"config.json has `{name}` = .* it must be a number"):
        open_folder(folder, "x", weights=False)


@pytest.mark.parametrize("value", [1, "x", [1]], ids=str)
def test_a_scaling_of_another_form_is_one_sentence(tmp_path: Path, value: object) -> None:
    """Before the fix, a build for TensorRT-LLM 1.2 ended with a traceback."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    rewrite(checkpoint / "config.json", rope_parameters={"full_attention": value})
    with pytest.raises(CheckpointError, match="are malformed"):
        build(BuildSpec(str(checkpoint), tmp_path / "engine", target="pytorch"), SilentProgress())
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 10**400], ids=["nan", "inf", "negative", "huge"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_scaling_of_positions_by_no_number_is_one_sentence(folder: Path, name: str, value: float) -> None:
    """Before the fix, transformers got it, and computed a model that answers nothing."""
    rewrite(folder / "config.json", **{name: {"full_attention": {"rope_type": "yarn", "factors": [1, value]}}})
    with pytest.raises(CheckpointError, match=f"in `{name}`, whose numbers must be from 0"):
        open_folder(folder, "x", weights=False)


@pytest.mark.parametrize(
    "changes",
    [{"num_labels": 10**9}, {"vision_config": {"num_hidden_layers": 10**9}}, {"max_window_layers": 1e9}],
    ids=str,
)  # fmt: skip
def test_counts_of_parts_that_are_not_built_are_bounded(folder: Path, changes: dict[str, object]) -> None:
    """Before the fix, transformers named each label: 5 s and 180 MB for a million of them."""
    rewrite(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"config\.json has .* and at most \d+ are possible"):
        open_folder(folder, "x", weights=False)


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Before the fix, the build succeeded, and no command could read the engine.json, in which there was no number."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    info = open_folder(checkpoint, "x").tensors["model.norm.weight"]
    with (checkpoint / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(struct.pack("<f", math.nan))
    with pytest.raises(CheckpointError, match="answers with NaN"):
        build(BuildSpec(str(checkpoint), tmp_path / "engine"), SilentProgress())
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("changes", [{"rope_parameters": "x"}, {"initializer_range": "x"}], ids=str)
def test_settings_that_transformers_cannot_read_are_one_sentence(tmp_path: Path, changes: dict[str, object]) -> None:
    """Before the fix, each was a traceback of a build that quantises."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    rewrite(checkpoint / "config.json", **changes)
    for load in (load_model, source_config):
        with pytest.raises(CheckpointError, match="cannot be loaded by transformers") as refusal:
            load(open_folder(checkpoint, "x"))
        assert "\n" not in refusal.value.message


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("implementation", ["evil/kernel", "flash_attention_2"])
def test_a_checkpoint_chooses_no_code_for_its_attention(tmp_path: Path, name: str, implementation: str) -> None:
    """Before the fix, transformers looked for a kernel of the hub, which is code, and a package was a traceback."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    rewrite(checkpoint / "config.json", **{name: implementation})
    for model in (load_model(open_folder(checkpoint, "x")), empty_model(read_hf_config(checkpoint))):
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    ("entry", "why"),
    [("[" * 900 + "]" * 900, "nested too deeply"), (r'"\ud800"', "half of a surrogate pair")], ids=["deep", "half"],
)  # fmt: skip
def test_settings_that_cannot_be_written_again(folder: Path, name: str, entry: str, why: str) -> None:
    """Before the fix, 7 MB of brackets took 50 s and 2 GB, as each became a line, and a half was a traceback."""
    fields = CONFIG if name == "config.json" else {}
    (folder / name).write_text(json.dumps({**fields, "added": "?"}).replace('"?"', entry))
    with pytest.raises(CheckpointError, match=f"{name} cannot be read as JSON .*{why}"):
        open_folder(folder, "x", weights=False)


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 16_000_000}, {"hidden_size": 10**9}, {"head_dim": 64}, {"num_key_value_heads": 1}], ids=str,
)  # fmt: skip
def test_settings_that_do_not_fit_the_weights(tmp_path: Path, changes: dict[str, object]) -> None:
    """Before the fix, 16 million tokens took 6 s and 355 MB, others were a traceback or a broken engine."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    rewrite(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError, match="and its configuration says"):
        build(BuildSpec(str(checkpoint), tmp_path / "engine"), SilentProgress())
    assert not (tmp_path / "engine").exists()


def test_transformers_reads_no_other_model_beside_the_weights(tmp_path: Path) -> None:
    """Before the fix, a build quantised pickled weights, whose reading can run code, and others than were checked."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    assert open_folder(checkpoint, "x").weight_files == ("model.safetensors",)
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(CheckpointError, match=r"has an adapter_config\.json"):
        load_model(open_folder(checkpoint, "x"))
    (checkpoint / "adapter_config.json").unlink()
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"cannot be loaded by transformers \(.*no file named model\.safetensors"):
        load_model(open_folder(checkpoint, "x"))


def _broken_map() -> dict[str, object]:
    """Return a tokenizer whose normaliser makes the library panic."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    return {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"normalizer": None, "model": {"type": "BPE", "vocab": {}, "merges": []}}, "no token"),
        ({}, "is damaged"),
        ({"model": {"type": "Nonsense"}}, "is damaged"),
        ({"truncation": {"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}}, "damaged"),
    ],
)
def test_a_tokenizer_that_fails_is_one_sentence(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    """A panic of the library and a tokenizer without tokens ended with tracebacks before the fix."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({**_broken_map(), **changes}))
    with pytest.raises(CheckpointError, match=why) as refusal:
        try_tokenizer(tmp_path / "tokenizer.json", "x")
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("character", ["x", "ж"])
def test_a_tokenizer_of_quadratic_time_is_refused(tokenizer: Path, character: str) -> None:
    """The trial had no run of an `x`: `x*x*[^x]` held a gateway's loop for 48 s at a message of 4 KB."""
    try_tokenizer(tokenizer, "x")
    split_first(tokenizer, f"{character}*[^{character}]")
    with pytest.raises(CheckpointError, match="it takes"):
        try_tokenizer(tokenizer, "x")


def character_map(key: str, written: str) -> str:
    """Return the table of a normaliser that writes `written` in place of `key`, a character of two bytes."""
    # A trie as a double array: each unit has a label, the offset of its children, and the flag of a leaf.
    units, at = [256 << 10, *[0] * 2047], 256
    for byte, flags in zip(key.encode(), (512 << 10, 1024 << 10 | 1 << 8), strict=True):
        at ^= byte
        units[at] = flags | byte
        at ^= flags >> 10
    index = struct.pack("<2048I", *units)
    return base64.b64encode(struct.pack("<I", len(index)) + index + written.encode() + b"\0").decode()


WORDS = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {"a": 0, "ж": 1, "##ж": 2}}
RARE = {
    # One of 4,096 characters took the event loop 10 s: its pieces are tried after `q` has become `z`.
    "pieces of": {
        "normalizer": {"type": "Replace", "pattern": {"String": "q"}, "content": "z"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [
            ["a", 0.0], *([letter * size, -1.0] for letter in "жq" for size in range(1, 1000))]},
    },
    # 4,096 characters took 3 s, and twice as many eight times as long.
    "divides words": {"model": {**WORDS, "max_input_chars_per_word": 10**9}},
    # 400 characters became 20 million tokens in 2.6 GB.
    "its normalizer write": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": character_map("ж", "b" * 50_000)}},
    # An answer of 4,096 tokens had 245 MB.
    "token of": {"model": {"type": "BPE", "merges": [], "vocab": {"a": 0, "b" * 60_000: 1}}},
    "rules of its normalizer": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "(?=ж)"}, "content": "ж"}] * 12}},
    "rules of its pre_tokenizer": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}] * 12}},
    # A message of 240 KB took a gateway 480 MB at 50 copies, and one of 800 bytes 950 MB at 20,000.
    "repeats each text": {"post_processor": {
        "type": "TemplateProcessing", "special_tokens": {},
        "single": [{"Sequence": {"id": "A", "type_id": number}} for number in range(50)],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}},
    # Each part of a word is copied behind the mark.
    "marks parts of words": {"model": {**WORDS, "continuing_subword_prefix": "#" * 1000}},
    "its normalizer has": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}},
}  # fmt: skip


@pytest.mark.parametrize("why", RARE)
def test_a_tokenizer_that_is_bad_for_rare_texts_is_refused(tokenizer: Path, why: str) -> None:
    """Before the fix, a build and a gateway took each of them: the texts that they are tried with are no such texts."""
    rewrite(tokenizer, **RARE[why])
    both_refuse(tokenizer, why)


def test_the_longest_known_tokens_are_taken(tokenizer: Path) -> None:
    """Claude's tokenizer has tokens of 1,024 spaces, as merges double the runs of one character."""
    rewrite(tokenizer, model={"type": "BPE", "merges": [], "vocab": {"a": 0, "\u0120" * 1024: 1, "\u0120" * 2048: 2}})
    check_growth(tokenizer)


def test_the_table_of_nfkc_is_taken(tokenizer: Path) -> None:
    """The longest text that NFKC writes for one character has 18."""
    table = character_map("ж", "\u0635" * 18)
    rules = [
        {"type": "Precompiled", "precompiled_charsmap": table},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
    ]
    rewrite(tokenizer, normalizer={"type": "Sequence", "normalizers": rules})
    try_tokenizer(tokenizer, "x")
    assert len(TextTokenizer(tokenizer.parent).encode("ж")) >= 18


def split_first(file: Path, pattern: str) -> None:
    """Have a tokenizer split texts by a regular expression before all else."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    own = json.loads(file.read_text())["pre_tokenizer"]
    rewrite(file, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, own]})


@pytest.mark.parametrize("seconds", [(0.09, 0.09), (0.5, 0.01)])
def test_a_tokenizer_of_linear_time_is_taken(monkeypatch, tokenizer_dir: Path, seconds: tuple[float, float]) -> None:
    """DeepSeek-Coder's, which reads 16,384 line breaks in 0.03 s, was refused by chance before the fix."""
    breaks = iter(seconds)
    monkeypatch.setattr(tokenizer_trial, "_cpu_seconds", lambda _, text: next(breaks) if text[0] == "\n" else 0.004)
    assert tokenizer_trial._problem(tokenizer_dir / "tokenizer.json") == ""


async def test_a_tokenizer_that_may_take_seconds_is_kept_off_the_event_loop(tokenizer: Path) -> None:
    """Such a tokenizer passed the trial, and took 8 s on the event loop for a chat of 964 characters."""
    pair = "\u10c8\u10a0"
    split_first(tokenizer, f"(?:(?:{pair})*(?:{pair})*(?:{pair})*(?:{pair})*)y|\\s+|\\S")
    try_tokenizer(tokenizer, "x")
    served = TextTokenizer(tokenizer.parent)
    with contextlib.closing(TextThreadPool()) as threads:
        thread, ids = await threads.run(lambda: (threading.current_thread(), served.encode(pair * 40)), 80)
    assert thread.name.startswith("llmops-slow")
    assert ids


async def test_a_slow_tokenizer_of_an_embedding_model_keeps_no_filter_on_the_event_loop() -> None:
    threads: list[threading.Thread] = []
    encode = Mock(side_effect=lambda *_, **__: threads.append(threading.current_thread()) or [1])
    tokenizer = SimpleNamespace(is_slow=True, frame=SimpleNamespace(size=0, ids=list), encode_beginning=encode)
    model = SimpleNamespace(card=SimpleNamespace(max_seq_len=8), tokenizer=tokenizer, embed=AsyncMock())
    await text_embedder(SimpleNamespace(get=lambda *_: model))("m", ["a"])
    assert threads[0] is not threading.main_thread()


def test_a_tokenizer_that_was_slow_leaves_the_event_loop(tokenizer: Path) -> None:
    """An expression of quadratic time takes at most 0.3 s on the event loop, once in ten seconds."""
    split_first(tokenizer, "|".join(f"[zq]*[{letter}é]" for letter in "abcdefg"))
    served = TextTokenizer(tokenizer.parent)
    served.encode("Hello")
    assert not served.is_slow
    served.encode("zq" * 2048)
    assert served.is_slow


_BRIEF = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _DIGITS, _OTHERS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CAPITALS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_NO_HAN = tuple(one.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for one in _CAPITALS)
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_POSSESSIVE = r" ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK = ["[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"]
_DEEPSEEK += [" ?[\\p{P}\\p{S}]+[\r\n]*", _SPACES]
#: The expressions by which known tokenizers split texts, each by its alternatives.
_KNOWN: dict[str, list[list[str]]] = {
    "gpt-2": [[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"]],
    "cl100k, llama-3, phi-4, glm-4": [[_BRIEF, _WORD, _DIGITS, _OTHERS, _SPACES]],
    "cl100k, possessive": [[r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+", _DIGITS, _POSSESSIVE]],
    "qwen-2 to qwen-3": [[_BRIEF, _WORD, r"\p{N}", _OTHERS, _SPACES]],
    "qwen-3.5": [[_BRIEF, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES]],
    "o200k, gpt-oss, llama-4": [[*(f"{one}{_BRIEF}?" for one in _CAPITALS), _DIGITS, _SLASHES, _SPACES]],
    "tekken, nemotron": [[*_CAPITALS, r"\p{N}", _SLASHES, _SPACES]],
    "kimi-k2": [[r"[\p{Han}]+", *(f"{one}{_BRIEF}?" for one in _NO_HAN), _DIGITS, _OTHERS, _SPACES]],
    "deepseek-v2": [
        *([one] for one in ("[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$")),
        *([one] for one in ("[一-龥ࠀ-一가-퟿]+", r"\p{N}+")),
    ],
    "deepseek-v3, deepseek-r1": [[_DIGITS], ["[一-龥぀-ゟ゠-ヿ]+"], _DEEPSEEK],
    "clip": [[r"\s+"], [r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"]],
    "bloom": [[r" ?[^(\s|[.,!?…。，、।۔،])]+"]],
    "falcon": [["[0-9][0-9][0-9]"]],
    "command-a": [[r"\d{1,3}(?=(?:\d{3})*\b)"]],
    "superbpe": [[_DIGITS], [r"(?=(\d{3})+(?!\d))"]],
    "t5": [[" {2,}"]],
    "gemma, starcoder, smollm": [],
}


@pytest.mark.parametrize("known", [["|".join(parts) for parts in one] for one in _KNOWN.values()], ids=_KNOWN)
def test_known_tokenizers_stay_on_the_event_loop(known: list[str]) -> None:
    """The steps that the expressions of known tokenizers may take are bounded."""
    assert are_quick(known)


@pytest.mark.parametrize(
    "pattern",
    [
        "x*x*[^x]", "(a+)+$b", "(?:a|a)*b", "(?:a|a)" * 20 + "b", "(a?){50}b", "a{0,999}a{0,999}b", "(?>a*)*b",
        "a{1,3}+b", "(?i:[ßs]*)b", "(?=a*b*)c", "(?<=a*b*)c", r"(?<x>a)\k<x>*b", r"\R*b", "(?~a)*b", "(?x: a*)b",
        "|".join(f"x{{2000}}{chr(at)}" for at in range(200, 300)), "x" * 5000, "(?:" * 1000 + "a" + ")" * 1000, "[a\\",
    ],
)  # fmt: skip
def test_no_other_expression_counts_as_quick(pattern: str) -> None:
    """Each expression is slow in some text, or is read in another way by Oniguruma than by Python."""
    assert not are_quick([pattern])


def test_templates_that_fail_leave_none_of_their_values() -> None:
    """Before the fix, a gateway grew from 173 to 2,121 MiB in 24 requests, and kept it."""
    text = "{% set x %}{% for i in range(1000) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}{{ x * 99999 }}"
    template = ChatTemplate(text, {})
    page, before = resource.getpagesize(), 0
    for _ in range(scaled(8, 40)):
        with pytest.raises(InvalidRequestError, match="too long"):
            template.render([])
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        before = before or resident
    record(f"{(resident - before) / MIB:.0f} MiB more after the first")
    assert resident - before < 300 * MIB


def test_a_text_that_a_tokenizer_cannot_read_is_the_clients_error(tokenizer: Path) -> None:
    """The panic of the tokenizer's library passed all handlers: a 500 without JSON, and a response without an end."""
    split_first(tokenizer, "(a+)+$b")
    served = TextTokenizer(tokenizer.parent)
    assert served.encode("Hello")
    with pytest.raises(InvalidRequestError, match="cannot encode the text"):
        served.encode("a" * 2000)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("tokenizer_config.json", {"vocab_file": "/secret"}),
        ("tokenizer_config.json", {"vocab": "/secret"}),
        ("tokenizer_config.json", {"init_inputs": ["/secret"]}),
        ("special_tokens_map.json", {"vocab_file": "../secret"}),
        ("config.json", {**CONFIG, "transformers_weights": "../secret"}),
    ],
)
def test_settings_that_name_a_file_outside(folder: Path, tmp_path: Path, name: str, entries: dict[str, object]) -> None:
    """Before the fix, the lines of the file were the engine's vocabulary, and weights came from another folder."""
    (tmp_path / "secret").write_text("hunter2")
    (folder / "vocab.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"vocab_file": "vocab.json", "name_or_path": "/home/ann/model"}')
    open_folder(folder, "x", weights=False)
    (folder / name).write_text(json.dumps(entries).replace('"/secret', f'"{tmp_path}/secret'))
    with pytest.raises(CheckpointError, match=f"{name} names another file") as refused:
        open_folder(folder, "x", weights=False)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("config.json", {**CONFIG, "transformers_weights": "other.safetensors.index.json"}),
        ("config.json", {**CONFIG, "attribute_map": {"transformers_weights": "x"}, "x": "o.safetensors.index.json"}),
        ("config.json", {**CONFIG, "configuration_files": ["config.4.0.0.json"]}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}),
    ],
)
def test_settings_that_name_files_which_are_not_checked(folder: Path, name: str, entries: dict[str, object]) -> None:
    """Before, the index named another folder's weights, and the other config.json any sizes."""
    (folder / name).write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=r"\.json has an entry \w+, which makes transformers read files"):
        open_folder(folder, "x", weights=False)


def test_settings_of_a_million_texts_are_refused(folder: Path) -> None:
    """Before, each text was looked up on disk twice: 22 s of CPU for 8 MiB."""
    texts = [f"{at:x}" for at in range(900_000)]
    for entries, outcome in (
        ({"x": [""] * 2_000_000}, contextlib.nullcontext()),
        ({"x": texts}, pytest.raises(CheckpointError, match="has more than 131,072 texts")),
    ):
        (folder / "generation_config.json").write_text(json.dumps(entries, separators=(",", ":")))
        begun = time.process_time()
        with outcome:
            open_folder(folder, "x", weights=False)
        assert time.process_time() - begun < 5


def test_a_tokenizer_whose_decoder_panics_is_refused(tokenizer: Path) -> None:
    """Before the fix, each answer of the model was a 500 without JSON, and 3 KB of backtrace in the log."""
    for stop, outcome in ((0, contextlib.nullcontext()), (5, pytest.raises(InputError, match="at the end of tokens"))):
        rules = [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": stop}]
        rewrite(tokenizer, decoder={"type": "Sequence", "decoders": rules})
        with outcome:
            TextTokenizer(tokenizer.parent)


def both_refuse(tokenizer: Path, why: str) -> None:
    """Neither a build nor a gateway takes this tokenizer."""
    with pytest.raises(InputError, match=why):
        TextTokenizer(tokenizer.parent)
    with pytest.raises(CheckpointError, match=why):
        try_tokenizer(tokenizer, "x")


def test_a_decoder_with_a_regular_expression_is_refused(tokenizer: Path) -> None:
    """One token of 2,000 characters took 6 s of a gateway's loop, at /detokenize and in each answer with it."""
    replace = {"type": "Replace", "pattern": {"Regex": "x*x*[^x]"}, "content": "z"}
    own = json.loads(tokenizer.read_text())["decoder"]
    rewrite(tokenizer, decoder={"type": "Sequence", "decoders": [replace, own]})
    both_refuse(tokenizer, "regular expression")


def test_a_gateways_tokenizer_folder_with_a_link_out_of_it_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    """Before the fix, the text of the file was in every prompt, for callers to ask for."""
    secret, given = tmp_path / "secret", tokenizer.parent
    secret.write_text("hunter2 {{ messages[0].content }}")
    (tmp_path / "linked").symlink_to(given)
    assert TextTokenizer(tmp_path / "linked")
    (given / "chat_template.jinja").unlink(missing_ok=True)
    (given / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(InputError, match="leads out of its folder"):
        TextTokenizer(given)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "written",
    # one rule, with which a gateway grew from 160 to 4,249 MiB, and a chain that took 10.3 GiB while loading
    [["b" * 100_000], ["bbb"] * 8],
    ids=["one rule", "a chain"],
)
def test_a_tokenizer_that_expands_texts_is_refused(tokenizer, part, written):
    rules = [{"type": "Replace", "pattern": {"String": "a"}, "content": text} for text in written]
    rewrite(tokenizer, **{part: {"type": "Sequence", f"{part}s": rules}})
    both_refuse(tokenizer, f"rules of its {part} write up to")


def add_special_tokens(file: Path, contents: list[str]) -> None:
    flags = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
    added = [{"id": 9999 + at, "content": f"<|{content}|>", **flags} for at, content in enumerate(contents)]
    rewrite(file, added_tokens=json.loads(file.read_text())["added_tokens"] + added)


def test_special_tokens_without_end(tokenizer: Path) -> None:
    """Before the fix, one token of 60,000 characters took 1.7 GB of each gateway, for all of its beginnings.

    The library took 16 s to load it, and hours for one of two million.
    """
    add_special_tokens(tokenizer, ["a" * 500])
    with small():
        TextTokenizer(tokenizer.parent).keep_controls_apart()
    add_special_tokens(tokenizer, ["a" * 60_000])
    both_refuse(tokenizer, "an added token of 60,004 characters")


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_an_added_token_of_a_gguf_that_is_a_page(kind: int) -> None:
    """Before the fix, 65,536 characters took the build 16 s, and an 8 MB file ran for hours."""
    fields = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "a" * scaled(40_000, 65_536)], "merges": []}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in {**fields, "token_type": [1, kind]}.items()}
    with small(), pytest.raises(CheckpointError, match="an added token of"):
        tokenizer_from_gguf(metadata)


def test_a_gguf_of_a_million_merges(tmp_path: Path) -> None:
    """Before the fix, four million merges of 45 MB took 1,075 MiB."""
    count = 4 << 20
    merges = text("tokenizer.ggml.merges") + struct.pack("<IIQ", _ARRAY, _STRING, count) + text("a b") * count
    with small(), pytest.raises(CheckpointError, match="entries in one list"):
        read_header(gguf(tmp_path / "a.gguf", [merges]))


def test_special_tokens_that_are_a_library_are_refused(tokenizer: Path) -> None:
    """Before the fix, a regular expression of 100 such tokens took 464 MB and 5.6 s of each gateway."""
    add_special_tokens(tokenizer, [f"{at}{'a' * 50_000}" for at in range(100)])
    both_refuse(tokenizer, "its added tokens have 5,000,")


def test_a_tokenizer_that_adds_many_tokens_is_refused(tokenizer: Path) -> None:
    """Before the fix, a file of 64 KB made 900,000 tokens of each text, and held a gateway up for 1.5 s."""
    own, text = {"SpecialToken": {"id": "e", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": [*[own] * 300, text], "pair": pair}
    template["special_tokens"] = {"e": {"id": "e", "ids": [0] * 3000, "tokens": ["e"] * 3000}}
    rewrite(tokenizer, post_processor={"type": "Sequence", "processors": [template]})
    both_refuse(tokenizer, "adds 900,000 special tokens")


def test_the_tokenizer_of_an_encoder_is_tried_too(encoder: Path) -> None:
    """Before the fix, only those of models that generate were."""
    rewrite(encoder / "tokenizer.json", normalizer=_broken_map()["normalizer"])
    with pytest.raises(CheckpointError, match=r"tokenizer of .* is damaged"):
        build(BuildSpec(str(encoder), encoder.parent / "engine"), SilentProgress())


@pytest.mark.parametrize("ids", [10**400, list(range(2000))], ids=["large", "many"])
def test_token_ids_that_no_engine_can_have(tmp_path: Path, ids: object) -> None:
    """Before the fix, they were a traceback."""
    folder = write_checkpoint(tmp_path / "checkpoint", "llama")
    rewrite(folder / "generation_config.json", eos_token_id=ids)
    with pytest.raises(CheckpointError, match="has a value that no engine can have") as refusal:
        build(BuildSpec(str(folder), tmp_path / "engine"), SilentProgress())
    assert len(refusal.value.message) < 1000


def shards(folder: Path, headers: list[str]) -> None:
    for number, header in enumerate(headers):
        raw = header.encode()
        (folder / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)


def empty_tensors(prefix: str, count: int) -> str:
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return "{" + ",".join(f'"{prefix}{at:x}":{entry}' for at in range(count)) + "}"


def test_headers_that_are_large_together(folder: Path) -> None:
    """Before the fix, six of 16 MB took 751 MiB and 20 s, and 24 of them minutes."""
    for headers, why in (
        ([f'{{"__metadata__":{{"a":"{"x" * 15_000_000}"}}}}'] * 3, "bytes in the headers of its weight files"),
        ([empty_tensors(name, 45_000) for name in "abcdef"], "more than 262,144 tensors"),
        ([empty_tensors("a", 270_000)], "values in its header"),
        (['{"__metadata__":[' + "[]," * 5_000_000 + "[]]}"], "values in its header"),
    ):
        shards(folder, headers)
        with max_cost(192, 5, time.thread_time), pytest.raises(CheckpointError, match=why):
            open_folder(folder, "x")
        for file in folder.glob("*.safetensors"):
            file.unlink()


def test_more_files_than_a_checkpoint_has(folder: Path) -> None:
    """Before the fix, 100,000 empty files took 7 s and 120 MB, and as many of weights ended with a traceback."""
    shards(folder, ["{}"] * 1025)
    with pytest.raises(CheckpointError, match="more than 1,024 weight files"):
        open_folder(folder, "x")
    for number in range(2**14):
        (folder / str(number)).touch()
    with pytest.raises(CheckpointError, match="more than 16,384 files"):
        open_folder(folder, "x")


def test_a_checkpoint_has_few_levels_of_folders(tmp_path: Path) -> None:
    """Before the fix, 15,000 empty files below 800 folders took a build a minute of CPU."""
    tmp_path.joinpath("config.json").write_text("{}")
    tmp_path.joinpath(*"abcdefghijklmnopq").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="more than 16 levels of folders"):
        reject_outside_symlinks(tmp_path)


def test_an_index_of_a_file_whose_name_is_a_page(folder: Path) -> None:
    """Before the fix, it ended with a traceback."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a" * 5000}}))
    with pytest.raises(CheckpointError, match="no `weight_map` of tensors to file names"):
        open_folder(folder, "x")


def test_a_tensor_that_is_in_two_files(folder: Path) -> None:
    """Before the fix, the last of them was built."""
    shards(folder, [empty_tensors("a", 2), empty_tensors("a", 1)])
    with pytest.raises(CheckpointError, match=r"has a0 both in model-0\.safetensors and model-1\.safetensors"):
        open_folder(folder, "x")


def test_a_tensor_of_many_dimensions(tmp_path: Path) -> None:
    """Before the fix, the product of 400,000 sizes took minutes."""
    entry = {"a": {"dtype": "F32", "shape": [2**60 - 1] * scaled(200_000, 400_000), "data_offsets": [0, 4]}}
    raw = json.dumps(entry).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with small(), pytest.raises(CheckpointError, match="at most 16 are read"):
        read_safetensors(path, "a.safetensors")


def test_an_architecture_that_is_a_book(folder: Path) -> None:
    """Before the fix, the search for a similar name took 260 MB."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLM" * 450_000]}))
    with small(), contextlib.suppress(CheckpointError):
        open_folder(folder, "x", weights=False)


@pytest.mark.parametrize("name", ["Llama\nBuilt and verified.", "\r\nBuilt and verified."])
def test_a_name_of_a_checkpoint_begins_no_line_of_an_error(folder: Path, name: str) -> None:
    """Before the fix, a stranger's line stood on the terminal below the error, as if llmops had written it."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [name]}))
    said = forked_cli.run("build", str(folder), "-o", str(folder.parent / "engine")).stderr
    assert "Built and verified" in said
    assert [line for line in said.splitlines() if line.startswith("Built")] == []


def test_modules_in_a_checkpoint_are_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the fix, `llmops build .` in a stranger's checkpoint ran the `tokenizers.py` that lay there."""
    monkeypatch.chdir(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for name in ("llmops", "jinja2", "tokenizers", "json"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    assert render_messages(folder, ["a"]) == ["a"]
    with pytest.raises(CheckpointError, match="is damaged"):
        try_tokenizer(folder / "tokenizer.json", "x")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("tokenizer_config.json", {"eos_token": "a"}),
        ("tokenizer.json", {"added_tokens": [{"content": ["a"], "id": 1}]}),
        ("tokenizer.json", {"added_tokens": [{"content": "a", "id": [1]}]}),
    ],
)
def test_an_added_token_that_is_a_list_gets_a_sentence(folder: Path, name: str, entries: dict[str, object]) -> None:
    """Before the fix, each list ended with a traceback."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    (folder / name).write_text(json.dumps(entries))
    refused = pytest.raises(CheckpointError, match=r"settings of .* are malformed")
    with refused if name == "tokenizer.json" else contextlib.nullcontext():
        open_checkpoint(str(folder), weights=False)


def test_a_template_that_no_gateway_takes_is_refused(folder: Path) -> None:
    """Before the fix, one of a million characters took the build 6.6 s and 250 MB, and no gateway served the engine."""
    (folder / "tokenizer.json").write_text("{}")
    for length in (1 << 17, (1 << 17) + 1):
        (folder / "chat_template.jinja").write_text("a" * length)
        refused = pytest.raises(CheckpointError, match="a chat template of more than 131,072 characters")
        with refused if length > 1 << 17 else contextlib.nullcontext():
            check_tokenizer(open_folder(folder, "x", weights=False))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_hole_in_a_gateways_tokenizer_folder(tokenizer: Path, name: str) -> None:
    """Before the fix, a gateway took 3 GB."""
    with (tokenizer.parent / name).open("a") as file:
        file.truncate(3 << 30)
    with small(), pytest.raises((InputError, OSError), match="more than 8 MiB"):
        TextTokenizer(tokenizer.parent)


ODD_FP8 = {"quant_method": "fp8", "weight_block_size": {"a": 1}}
ODD_GROUPS = {"quant_method": "compressed-tensors", "config_groups": "x"}
ODD_FIELDS = [{"architectures": [["x"]]}, *({"quantization_config": odd} for odd in (ODD_FP8, ODD_GROUPS))]


@pytest.mark.parametrize("config", [[], "text", *({**CONFIG, **fields} for fields in ODD_FIELDS)], ids=str)
def test_a_config_of_another_form_gets_a_sentence(folder: Path, tmp_path: Path, config: object) -> None:
    """Before the fix, these ended with a traceback."""
    (folder / "config.json").write_text(json.dumps(config))
    command = ["build", folder, "-o", tmp_path / "engine", "--target", "pytorch", "--gpu", "h100-sxm", "--dry-run"]
    done = forked_cli.run(*command)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("Error: ")
