"""Files that a user names and that strangers made: settings, plans, traces, reports, heads, LoRA adapters.

Each is refused in one sentence: a hole of three gigabytes, JSON nested 300,000 times, numbers of 6,000 digits.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from llmops.build.checkpoint import open_checkpoint
from llmops.build.checkpoint.lora_adapters import read_adapters
from llmops.build.plan.build_plan import BuildPlan
from llmops.build.plan.speed.measured_steps import MeasuredSteps
from llmops.build.quantize.calibration import CalibrationSettings, load_texts
from llmops.cli.filter_evaluation import read_examples
from llmops.cli.prefix import _read_bodies
from llmops.errors import CheckpointError, LlmopsError
from llmops.gateway.routing.admission.degradation import LevelFile
from llmops.gateway.safety.services import read_head
from llmops.model_repository.repository.manifest import REPOSITORY_FILE, RepositoryManifest
from llmops.perf.report.document import read_document
from llmops.perf.workloads.files import read_trace
from llmops.yaml_files import read_yaml
from tests.attacks.test_checkpoints import folder, rewrite, small

__all__ = ["folder"]

READERS: Mapping[str, Callable[[Path], object]] = {
    "f.yaml": read_yaml,
    "plan.json": BuildPlan.load,
    "measured.json": MeasuredSteps.load,
    "report.json": read_document,
    "trace.jsonl": read_trace,
    "examples.jsonl": read_examples,
    "head.json": read_head,
    "bodies.json": lambda path: list(_read_bodies(path)),
    REPOSITORY_FILE: lambda path: RepositoryManifest.load(path.parent),
}
CONTENTS = {"deep": '{"a": ' * 300_000, "digits": '{"a": %s}' % ("1" * 6000), "list": "[null]", "bytes": "\udcff\udcfe"}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_of_another_form_is_one_sentence(tmp_path: Path, name: str, content: str) -> None:
    """Before the fix, six of nine readers ended with a traceback."""
    path = tmp_path / name
    path.write_bytes(CONTENTS[content].encode(errors="surrogateescape"))
    if content == "list" and name == "f.yaml":
        return
    with pytest.raises(LlmopsError) as refused:
        READERS[name](path)
    assert len(refused.value.message.splitlines()) == 1


@pytest.mark.parametrize("name", READERS)
def test_a_hole_takes_no_memory(tmp_path: Path, name: str) -> None:
    """Before the fix, a hole took 724 MiB to 4 GiB, and /dev/zero all memory."""
    path = tmp_path / name
    path.write_text('{"a": "')
    os.truncate(path, 3 << 30)
    with small(), pytest.raises(LlmopsError, match=r"more than|cannot be read"):
        READERS[name](path)


def test_calibration_reads_no_hole(tmp_path: Path) -> None:
    """Before the fix, a hole of 3 GB took 6 GB."""
    for path in (tmp_path / "a.jsonl", tmp_path / "a.txt"):
        path.write_text("a")
        os.truncate(path, 1 << 30)
        with small(), pytest.raises(LlmopsError, match="more than 4 MiB"):
            load_texts(CalibrationSettings(str(path)))


def test_calibration_reads_the_beginning_of_equal_rows(tmp_path: Path) -> None:
    """Before the fix, a Parquet file of a few hundred bytes took all of the memory."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 150_000), ["x" * 10_000])
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet", store_schema=False)
    assert 1000 < len(load_texts(CalibrationSettings(str(tmp_path / "a.parquet")))) < 10_000


@pytest.mark.parametrize("column", ["text", "messages"])
def test_calibration_refuses_a_row_that_is_too_large(tmp_path: Path, column: str) -> None:
    """Before the fix, such a row took 2 GB, and a larger one all of the memory."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = ["x" * 300_000_000] if column == "text" else [[{"content": "x" * 10_000}] * 50_000]
    options = {"compression": "zstd", "use_dictionary": column == "messages", "write_statistics": False}
    parquet.write_table(pyarrow.table({column: row}), tmp_path / "a.parquet", **options)
    with pytest.raises(LlmopsError, match="1024 MiB to read"):
        load_texts(CalibrationSettings(str(tmp_path / "a.parquet")))


def test_a_long_passage_is_divided(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 999 + "\r\n\r\n" + ("y" * 100_000 + "\n") * 60)
    texts = load_texts(CalibrationSettings(str(tmp_path / "a.txt")))
    assert sorted(len(text) // 100_000 for text in texts) == [0, 18, 42]


#: Merge keys in eight levels: before the fix, these 3 KiB took all memory.
MERGED = "a0: &a0 {" + ",".join(f"k{at}: 1" for at in range(200)) + "}\n"
MERGED += "".join(f"a{at}: &a{at} {{<<: [{','.join([f'*a{at - 1}'] * 40)}]}}\n" for at in range(1, 9))


@pytest.mark.parametrize("text", ["a: 9999-99-99", "? [a, b]\n: c", "a: " + "1" * 6000, "{a: " * 2000, MERGED])
def test_yaml_that_has_no_value_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(LlmopsError, match=r"f\.yaml"):
        read_yaml(tmp_path / "f.yaml")


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.write_text("{a: " * 2000), lambda path: path.mkdir()])
def test_a_file_of_levels_that_is_no_file_sets_no_level(tmp_path: Path, caplog, put: Callable[[Path], object]) -> None:
    """Before the fix, a pipe held the gateway's event loop for ever, and a deep file ended the task that reads it."""
    path = tmp_path / "levels.yaml"
    put(path)
    levels = LevelFile(path)
    levels.reload()
    assert levels.level("m") is None
    assert "cannot be read (" in caplog.text


def test_a_wrong_level_is_named(tmp_path: Path, caplog) -> None:
    (tmp_path / "levels.yaml").write_text("m: 1\nn: high")
    levels = LevelFile(tmp_path / "levels.yaml")
    levels.reload()
    assert levels.level("m") is None
    assert "cannot be read ('high' is no level); write a number from 0 to 4" in caplog.text


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 4000, "m: 2\n" * 20_000])
def test_a_file_of_levels_holds_the_event_loop_for_a_moment(tmp_path: Path, caplog, text: str) -> None:
    """Before the fix, brackets took 0.8 s of the event loop, and 100 KB of levels 0.4 s."""
    (tmp_path / "levels.yaml").write_text(text)
    levels, begun = LevelFile(tmp_path / "levels.yaml"), time.process_time()
    levels.reload()
    assert time.process_time() - begun < 0.2
    assert "cannot be read" in caplog.text
    assert levels.level("m") is None


def test_brackets_of_a_yaml_file_take_no_second(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("[" * 3000)
    begun = time.process_time()
    with pytest.raises(LlmopsError, match="nested too deeply"):
        read_yaml(tmp_path / "f.yaml")
    assert time.process_time() - begun < 0.2


@pytest.mark.parametrize(
    "weights",
    [{"a": 5}, {"a": []}, {"a": [float("nan"), 1.0]}, {"a": ["x"]}, [1], {"a": [[1]]}, {"a": [1e308, 10**400]}],
)
def test_a_head_whose_weights_are_no_numbers_is_refused(tmp_path: Path, weights: object) -> None:
    (tmp_path / "head.json").write_text(json.dumps({"model": "m", "weights": weights, "thresholds": {}}))
    with pytest.raises(LlmopsError, match="is not a safety head"):
        read_head(tmp_path / "head.json")


# -- LoRA adapters -----------------------------------------------------------------------------------------------------


def weights(**shapes: tuple[int, ...]) -> Callable[[Path], object]:
    """Return what writes adapters of attention layers, by layer, module and matrix: `l0_q_proj_A`."""

    def write(folder: Path) -> None:
        import numpy as np

        names = {name: name.replace("_", ".self_attn.", 1)[1:-2] + f".lora_{name[-1]}.weight" for name in shapes}
        found = {f"base_model.model.model.layers.{names[one]}": np.zeros(shapes[one], "float32") for one in shapes}
        save_file(found, folder / "adapter_model.safetensors")

    return write


def in_config(spoil: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: spoil(folder / "adapter_config.json")


def in_weights(spoil: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: spoil(folder / "adapter_model.safetensors")


RIGHT = {"l0_q_proj_A": (4, 32), "l0_q_proj_B": (32, 4)}
SPOILED = [
    # before, each row of an adapter took the longest one's memory: 7 GB for a file of 64 KB on the disk
    weights(**RIGHT, l0_o_proj_A=(4, 32), l0_o_proj_B=(1_000_000, 4)),
    weights(l0_q_proj_A=(2, 32), l0_q_proj_B=(32, 2)),
    weights(l0_q_proj_A=(4, 32), l0_q_proj_B=(128,)),
    weights(l0_q_proj_A=(4, 32)),
    weights(l0_q_proj_A=()),
    weights(**{f"l{'9' * 5000}{name[2:]}": shape for name, shape in RIGHT.items()}),
    # before the fix, a hole took 3 GiB, and a deep file and a loop of links ended with a traceback
    lambda folder: os.mkfifo(folder / "adapter_config.json.new"),
    lambda folder: (folder / "loop").symlink_to(folder / "loop"),
    in_config(lambda path: os.truncate(path, 3 << 30)),
    # before the fix, an engine had 3 GiB of nothing, and building it took 15 s
    in_weights(lambda path: os.truncate(path, 3 << 30)),
    in_weights(lambda path: path.write_bytes(path.read_bytes() + b"x")),
    in_config(lambda path: path.unlink() or path.symlink_to("/etc/passwd")),
    in_config(lambda path: path.write_text('{"r": ' * 300_000)),
    # before the fix, a rank of 0 and an alpha as text ended with a traceback
    *(in_config(partial(rewrite, r=rank)) for rank in (0, -4, 10**30, None)),
    in_config(partial(rewrite, lora_alpha=[1])),
    in_config(partial(rewrite, r=True, lora_alpha=float("nan"))),
]


@pytest.mark.parametrize("spoil", SPOILED)
def test_an_adapter_is_checked(folder: Path, tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    architecture = open_checkpoint(str(folder), weights=False).architecture
    (adapter := tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights(**RIGHT)(adapter)
    read_adapters({"a": adapter}, architecture)
    spoil(adapter)
    with pytest.raises(CheckpointError) as refused:
        read_adapters({"a": adapter}, architecture)
    assert len(refused.value.message.splitlines()) == 1
