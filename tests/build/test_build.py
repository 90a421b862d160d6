"""Engine folders appear whole or not at all, once per content."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmops.build.engine_folder import atomic_folder
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.job import build_engine
from llmops.build.job.build_engine import build
from llmops.build.progress import SilentProgress
from llmops.build.spec import BuildSpec
from llmops.cli.build import command
from llmops.errors import InputError, ResourceError
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.repository.compatibility import check_engines
from llmops.model_repository.repository.manifest import RepositoryManifest
from tests.support.waiting import wait_until


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def beside(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.iterdir() if output.name in path.name and path != output)


@pytest.fixture
def spec(tiny: Path, tmp_path: Path) -> BuildSpec:
    return BuildSpec(checkpoint=str(tiny), output=tmp_path / "out" / "engine")


def test_the_manifest_tells_what_went_in(spec: BuildSpec, tiny: Path) -> None:
    import hashlib
    from importlib import metadata

    manifest, cached = build(spec)
    assert not cached
    assert EngineManifest.load(spec.output) == manifest
    assert {file.path: file.sha256 for file in manifest.source.files} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tiny.iterdir()
    }
    assert manifest.versions["openvino"] == metadata.version("openvino")
    assert (manifest.name, manifest.architecture, manifest.target) == ("tiny-llama", "LlamaForCausalLM", "openvino")
    assert (manifest.limits.max_seq_len, manifest.tokenizer.vocab_size) == (256, 320)
    assert (manifest.tokenizer.bos_id, manifest.tokenizer.end_ids, manifest.tokenizer.chat_template) == (0, [1], True)
    assert manifest.complete


def test_force_builds_what_is_up_to_date(spec: BuildSpec) -> None:
    build(spec)
    before = (spec.output / "engine.json").stat()
    assert build(spec)[1] is True
    assert (spec.output / "engine.json").stat().st_ino == before.st_ino
    manifest, cached = build(spec, force=True)
    assert cached is False
    assert (spec.output / "engine.json").stat().st_ino != before.st_ino
    assert build(spec) == (manifest, True)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scramble(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_damaged_engine_is_refused_and_built_again(
    spec: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty tokenizer.json ended each start of `llmops up`. Of large files only the size is known."""
    monkeypatch.setattr("llmops.build.engine_folder.manifest._MAX_DIGESTED", 64 << 10)
    manifest, _ = build(spec)
    generate_repository(read_engines([str(spec.output)]), tmp_path / "repository")
    repository = RepositoryManifest.load(tmp_path / "repository")
    assert {*manifest.contents} == {path for path in manifest.files if path.startswith(("model/", "tokenizer/"))}
    assert manifest.contents["model/openvino_model.bin"] == (spec.output / "model/openvino_model.bin").stat().st_size
    for name, measure in manifest.contents.items():
        path = spec.output / name
        whole = path.read_bytes()
        for damage in (empty, halve, *([scramble] if isinstance(measure, str) else []), replace_by_pipe):
            damage(path)
            fault = "is missing" if damage is replace_by_pipe else "is not as the build wrote it"
            said = re.escape(f"{path} {fault}, so the engine is damaged: copy it again, or build it again.")
            for refused in (lambda: read_engines([str(spec.output)]), lambda: check_engines(repository)):
                with pytest.raises(InputError, match=said):
                    refused()
            path.unlink()
            path.write_bytes(whole)
    empty(spec.output / "tokenizer" / "tokenizer.json")
    again, cached = build(spec)
    assert not cached
    again.check_files(spec.output)


@pytest.mark.parametrize("change", ["flag", "weights", "damage"])
def test_another_build_replaces_the_engine(change: str, copy_of_tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "engine"
    first, _ = build(BuildSpec(checkpoint=str(copy_of_tiny), output=output))
    flags: dict[str, Any] = {}
    if change == "flag":
        flags = {"max_seq_len": 128}
    elif change == "weights":
        path = copy_of_tiny / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-2] ^= 1
        path.write_bytes(raw)
    else:
        (output / "engine.json").write_text("{}")
    second, cached = build(BuildSpec(checkpoint=str(copy_of_tiny), output=output, **flags))
    assert not cached
    assert (second.key == first.key) == (change == "damage")
    assert EngineManifest.load(output) == second
    assert beside(output) == []


def test_a_folder_that_is_no_engine_is_left_alone(spec: BuildSpec) -> None:
    spec.output.mkdir(parents=True)
    (spec.output / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="exists and is not an engine folder"):
        build(spec)
    assert contents(spec.output) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    ("manifest", "name"),
    [
        ("as built", "results/day1.csv"), ("as built", "tokenizer/notes.md"), ("as built", "model/notes.md"),
        ("damaged", "notes.md"), ("of an earlier build", "results/day1.csv"),
    ],
)  # fmt: skip
def test_own_files_in_an_engine_folder_stop_another_build(spec: BuildSpec, manifest: str, name: str) -> None:
    """The build removed them with the old engine, exit 0 and no word."""
    built, _ = build(spec)
    if manifest != "as built":
        earlier = built.model_copy(update={"files": []}).text()
        (spec.output / "engine.json").write_text("{}" if manifest == "damaged" else earlier)
    own = spec.output / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    with pytest.raises(ResourceError, match=f"did not make and would remove: {name}. Move them"):
        build(replace(spec, max_seq_len=64), force=True)
    assert own.read_text() == "mine"
    own.unlink()
    for system in (".DS_Store", "tokenizer/._tokenizer.json", "Thumbs.db", ".nfs0000000000a1b2c3"):
        (spec.output / system).touch()
    assert not build(replace(spec, max_seq_len=64))[1]


def test_a_missing_chat_template_is_a_warning(copy_of_tiny: Path, tmp_path: Path) -> None:
    (copy_of_tiny / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (copy_of_tiny / "chat_template.jinja").unlink(missing_ok=True)
    progress = SilentProgress()
    manifest, _ = build(BuildSpec(checkpoint=str(copy_of_tiny), output=tmp_path / "engine"), progress)
    assert not manifest.tokenizer.chat_template
    assert any("no chat template: the engine serves completions" in warning for warning in progress.warnings)


def test_a_full_disk_is_noticed_before_the_work(spec: BuildSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 70 << 20})
    monkeypatch.setattr(atomic_folder.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(build_engine, "_make", lambda *args: pytest.fail("the work was begun"))
    with pytest.raises(ResourceError, match=r"The build needs about \d+ MiB in .*, where 70 MiB are free; make room"):
        build(spec)
    assert not spec.output.exists()


def test_the_estimate_covers_what_is_written(tiny: Path, tmp_path: Path) -> None:
    from llmops.build.checkpoint import open_checkpoint
    from llmops.build.targets.openvino import openvino_target

    for quant in ("none", "int8", "int4"):
        spec = BuildSpec(checkpoint=str(tiny), output=tmp_path / quant, quant=quant)
        build(spec)
        written = sum(len(raw) for raw in contents(spec.output / "model").values())
        assert written < openvino_target.OpenVinoTarget().prepare(spec, open_checkpoint(str(tiny))).disk_bytes


def start_slow_build(tiny: Path, output: Path) -> subprocess.Popen[str]:
    """A build that waits, half done, with files already written."""
    script = (
        "import signal, sys, time; from pathlib import Path; from llmops.build.job import build_engine\n"
        "from llmops.build.targets.openvino.openvino_target import OpenVinoJob\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run behind a shell's &
        "def wait(*args): print('half way', flush=True); time.sleep(600)\n"
        "OpenVinoJob.build = wait\n"
        "sys.argv = ['llmops', 'build', sys.argv[1], '-o', sys.argv[2]]\n"
        "from llmops.cli.main import main; main()\n"
    )
    command = [sys.executable, "-c", script, str(tiny), str(output)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half way\n"
    return child


def test_an_interrupted_rebuild_keeps_the_old_engine(spec: BuildSpec, tiny: Path) -> None:
    build(replace(spec, max_seq_len=128))
    before = contents(spec.output)
    child = start_slow_build(tiny, spec.output)
    child.terminate()
    child.communicate(timeout=120)
    assert (contents(spec.output), beside(spec.output)) == (before, [])


def test_a_second_build_waits_for_the_first(spec: BuildSpec, tiny: Path) -> None:
    """It says for whom, and goes on when that one is gone."""
    child = start_slow_build(tiny, spec.output)
    progress = SilentProgress()
    progress.note = lambda sentence: (progress.notes.append(sentence), child.kill())  # type: ignore[method-assign]
    try:
        _, cached = build(spec, progress)
    finally:
        child.kill()
        child.communicate(timeout=120)
    assert not cached
    assert progress.notes == [f"another build for {spec.output} is under way (process {child.pid}); waiting for it."]
    assert beside(spec.output) == []


def test_a_folder_that_cannot_be_written_is_named(spec: BuildSpec) -> None:
    with pytest.raises(InputError, match=r"^/proc/engines cannot be written \(.*\); give -o another"):
        build(replace(spec, output=Path("/proc/engines/e")))


def test_the_lock_of_another_user_is_named(spec: BuildSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the fix, the folder was named, which members of a group may both write to."""
    lock = spec.output.with_name(f".{spec.output.name}.lock")
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    opened = os.open

    def refuse(path: str | Path, *args: int, **options: int) -> int:
        if path == lock:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=r"engine\.lock is the lock of another user's build; wait for its end"):
        build(spec)


def test_an_engine_that_a_killed_build_had_moved_aside_comes_back(spec: BuildSpec) -> None:
    """Killed between the two renames: the engine's name is free, the old engine lies aside."""
    build(spec)
    before = contents(spec.output)
    spec.output.rename(spec.output.with_name(".engine.0123abcd.replaced"))
    _, cached = build(spec)
    assert cached
    assert (contents(spec.output), beside(spec.output)) == (before, [])


def test_json_output_is_the_manifest(spec: BuildSpec, tiny: Path) -> None:
    result = CliRunner().invoke(command, [str(tiny), "-o", str(spec.output), "--json"], catch_exceptions=False)
    assert json.loads(result.stdout) == json.loads((spec.output / "engine.json").read_text())
    assert "Reading weights" in result.stderr


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "a b"}, "--name 'a b' cannot name a Triton model"),
        ({"max_batch_size": 0}, "--max-batch-size 0 is too small"),
        ({"tp": 8, "ep": 3}, "--ep 3 must divide --tp 8"),
        ({"tp": 0}, "--tp 0 is too small"),
    ],
)
def test_specs_that_make_no_sense(fields: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        BuildSpec(checkpoint="x", output=tmp_path / "engine", **fields)


# -- Temporary folders live only as long as the command that made them


HOLDER = """
import sys
from llmops.build.engine_folder.atomic_folder import scratch_folder
with scratch_folder("held-") as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("x" * 100000)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_after_a_kill_of_the_whole_group(tmp_path: Path, number: int) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True,
    )  # fmt: skip
    assert holder.stdout is not None
    folder = Path(holder.stdout.readline().strip())
    assert (folder / "deep" / "file").is_file()
    os.killpg(holder.pid, number)
    holder.communicate(timeout=120)
    wait_until(lambda: not folder.exists(), "the folder is gone")
    assert list(tmp_path.iterdir()) == []
