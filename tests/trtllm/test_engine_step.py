"""The trtllm-build step with a program in its place that behaves like it, and its faults."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from llmops.build.checkpoint import open_checkpoint
from llmops.build.engine_folder.atomic_folder import list_files
from llmops.build.engine_folder.build_lock import exclusive_build, exclusive_replacement
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.job import build_engine
from llmops.build.job.dry_run import dry_run
from llmops.build.job.resume import resume
from llmops.build.progress import SilentProgress
from llmops.build.spec import BuildSpec
from llmops.build.targets import tensorrt
from llmops.build.targets.nvidia import trtllm_build
from llmops.build.trtllm.image_selection import image_of
from llmops.errors import BuildError, InputError, MissingDependencyError, VersionMismatchError
from tests.support.manifests import engine_manifest
from tests.support.processes import commands
from tests.support.programs import install_program
from tests.support.tiny_models import write_config
from tests.support.waiting import wait_until

PROGRAM = """#!{python}
import argparse, os, pathlib, signal, sys, time
p = argparse.ArgumentParser()
p.add_argument("--checkpoint_dir"); p.add_argument("--output_dir"); p.add_argument("--workers", type=int)
a = p.parse_args()
fault = os.environ.get("FAULT", "")
out = pathlib.Path(a.output_dir)
out.mkdir(exist_ok=True)
for rank in range(2):
    assert (pathlib.Path(a.checkpoint_dir) / f"rank{{rank}}.safetensors").is_file()
    # both lines of tensorrt_llm/_common.py, serialize_engine
    print(f"[TRT-LLM] [I] Serializing engine to {{out}}/rank{{rank}}.engine...", flush=True)
    (out / f"rank{{rank}}.engine").write_bytes(b"" if fault == "empty" and rank else b"engine")
    if fault == "code": print("[TRT-LLM] [E] out of memory"); sys.exit(3)
    if fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if fault == "disk": print("OSError: [Errno 28] No space left on device"); sys.exit(1)
    if fault == "hang": time.sleep(600)
    print("[TRT-LLM] [I] Engine serialized. Total time: 00:00:01", flush=True)
(out / "config.json").write_text("{{}}")
# tensorrt_llm/builder.py: `builder.save_timing_cache(builder_config, build_config.output_timing_cache)`
pathlib.Path("model.cache").write_bytes(b"cache")
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.setattr(trtllm_build, "installed_version", lambda: "1.2.1")
    path = tmp_path / "bin" / trtllm_build.PROGRAM
    return install_program(monkeypatch, path, PROGRAM.format(python=sys.executable))


@pytest.fixture
def folder(tmp_path):
    """An engine folder whose last step is left."""
    made = tmp_path / "engine"
    (made / "checkpoint").mkdir(parents=True)
    (made / "model").mkdir()
    for rank in range(2):
        (made / "checkpoint" / f"rank{rank}.safetensors").write_bytes(b"x")
    argv = [trtllm_build.PROGRAM, "--checkpoint_dir", "checkpoint", "--output_dir", "model", "--workers", "2"]
    extra = {"trtllm_build": argv, "image": image_of("26.07").reference, "tensorrt_llm": "1.2.1"}
    engine_manifest("tensorrt", parallelism={"tp_size": 2}, complete=False, extra=extra).save(made)
    (made / trtllm_build.SCRIPT).write_text(trtllm_build.script(argv, image_of("26.07")))
    return made


class Steps(SilentProgress):
    def __init__(self):
        super().__init__()
        self.advanced = 0

    def advance(self, amount=1):
        self.advanced += amount


def test_resume_finishes_the_folder_with_progress_and_log(folder, program):
    steps = Steps()
    manifest, before = resume(folder, progress=steps)
    assert (manifest.complete, before, steps.advanced) == (True, False, 2)
    assert EngineManifest.load(folder).complete
    assert (folder / "model" / "rank1.engine").read_bytes() == b"engine"
    assert "Serializing engine to model/rank1.engine" in (folder / trtllm_build.LOG).read_text()
    assert resume(folder)[1] is True


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("code", r"ended with code 3.*\n.*\n.*out of memory"),
        ("kill", "killed by signal 9"),
        ("disk", "the disk is full"),
        ("empty", "wrote no rank1.engine"),
    ],
)
def test_faults_leave_the_folder_resumable(folder, program, monkeypatch, fault, says):
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(BuildError, match=says):
        resume(folder)
    assert not EngineManifest.load(folder).complete
    assert (folder / trtllm_build.LOG).is_file()
    monkeypatch.delenv("FAULT")
    assert resume(folder)[0].complete


def test_interrupting_takes_the_program_along(folder, program, monkeypatch):
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from pathlib import Path; from llmops.build.job.resume import resume\n"
    code += "import llmops.build.targets.nvidia.trtllm_build as e; e.installed_version = lambda: '1.2.1'\n"
    code += f"resume(Path({str(folder)!r}))"
    environment = {**os.environ, "FAULT": "hang"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    log = folder / trtllm_build.LOG
    wait_until(lambda: log.is_file() and "rank0" in log.read_text())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert [command for command in commands().values() if str(program) in command] == []
    assert not EngineManifest.load(folder).complete


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda folder, say: exclusive_build(folder, say, inside=True), exclusive_replacement),
        (exclusive_replacement, lambda folder, say: exclusive_build(folder, say, inside=True)),
    ],
    ids=["a build waits for a resume", "a resume waits for a build"],
)
def test_a_resume_and_a_new_build_take_turns(folder, first, second):
    waiting, entered = threading.Event(), threading.Event()

    def later():
        with second(folder, lambda sentence: waiting.set()):
            entered.set()

    thread = threading.Thread(target=later)
    with first(folder, lambda sentence: None):
        thread.start()
        assert waiting.wait(60)
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()
    assert not list(folder.parent.glob(".*.lock")) + list(folder.glob(".*.lock"))


def test_without_the_program_the_image_is_named(folder, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingDependencyError, match=r"26\.07-trtllm-python-py3, or add --in-container"):
        resume(folder)
    with pytest.raises(MissingDependencyError, match="docker"):
        resume(folder, in_container=True)


def test_a_folder_from_elsewhere_runs_no_other_program_and_writes_no_other_file(folder, program, tmp_path):
    """Before the fix, the files behind these links were overwritten, and `sh` in engine.json ran."""
    own = [tmp_path / "log", tmp_path / "part", tmp_path / "cache"]
    for link, file in zip((trtllm_build.LOG, ".engine.json.part", trtllm_build.TIMING_CACHE), own, strict=True):
        file.write_text("mine")
        (folder / link).symlink_to(file)
    assert resume(folder)[0].complete
    assert [file.read_text() for file in own] == ["mine"] * 3
    extra = {"trtllm_build": ["sh", "-c", f"touch {tmp_path}/theirs"], "image": image_of("26.07").reference}
    engine_manifest("tensorrt", complete=False, extra={**extra, "tensorrt_llm": "1.2.1"}).save(folder)
    with pytest.raises(InputError, match="nothing can be resumed"):
        resume(folder)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    "words",
    [["--model_cls_file", "checkpoint/theirs.py"], ["--output_timing_cache=/home/me/.profile"], ["--output_dir", ".."]],
)
def test_a_folder_from_elsewhere_names_no_code_and_no_files(folder, program, words):
    """tensorrt_llm/commands/build.py: `SourceFileLoader("models", args.model_cls_file)` runs the file."""
    manifest = EngineManifest.load(folder)
    content = json.loads(manifest.text())
    content["extra"]["trtllm_build"] += words
    (folder / "engine.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"build\.sh in place of `--resume`"):
        resume(folder)
    assert not EngineManifest.load(folder).complete


@pytest.mark.parametrize("is_listed", [True, False], ids=["as built", "of an earlier build"])
def test_files_of_trtllm_build_stop_no_other_build(folder, program, is_listed):
    """Before the fix, trtllm-build's model.cache was called a file that llmops did not make."""
    files = [name for name in list_files(folder) if name != "engine.json"] if is_listed else []
    EngineManifest.load(folder).model_copy(update={"files": files}).save(folder)
    resumed = resume(folder)[0]
    assert ("model.cache" in resumed.files) == is_listed
    (folder / "notes.md").touch()
    assert build_engine._added_files(folder) == ["notes.md"]


def test_another_version_is_refused(folder, program, monkeypatch):
    monkeypatch.setattr(trtllm_build, "installed_version", lambda: "1.2.0")
    with pytest.raises(VersionMismatchError, match=r"built for TensorRT-LLM 1.2.1, but 1.2.0 is installed"):
        resume(folder)


def test_a_build_hears_of_another_version_before_it_quantises(program, tmp_path, monkeypatch):
    write_config(tmp_path, "llama")
    monkeypatch.setattr(trtllm_build, "installed_version", lambda: "1.2.0")
    spec = BuildSpec(str(tmp_path), tmp_path / "e", "tensorrt")
    job = tensorrt.target.prepare(spec, open_checkpoint(str(tmp_path), weights=False))
    with pytest.raises(VersionMismatchError, match=r"built for TensorRT-LLM 1.2.1, but 1.2.0 is installed"):
        job.check()
    assert any("but 1.2.0 is installed" in line for line in dry_run(spec).missing)


def test_in_container_runs_build_sh_as_the_owner(folder, tmp_path, monkeypatch):
    files = f"cd {folder}/model && echo e > rank0.engine && echo e > rank1.engine && echo '{{}}' > config.json"
    # flashinfer/jit/core.py makes folders below HOME when it is imported; the owner is no user of
    # the image (triton-inference-server/server r26.07 build.py:1317 makes one, without a home)
    home = 'home=/; for word in "$@"; do case $word in HOME=*) home=${word#HOME=};; esac; done'
    imported = 'test "$home" = /tmp || { echo "PermissionError: $home/.cache" >&2; exit 1; }'
    script = f'#!/bin/sh\necho "$@" > {tmp_path}/args\n{home}\n{imported}\n{files}\n'
    install_program(monkeypatch, tmp_path / "bin" / "docker", script)
    assert resume(folder, in_container=True)[0].complete
    words = (tmp_path / "args").read_text()
    assert f"--user {os.getuid()}:{os.getgid()}" in words
    assert f"source={folder},target=/engine" in words
    assert words.endswith("tritonserver:26.07-trtllm-python-py3 sh /engine/build.sh\n")
