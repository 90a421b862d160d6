"""A quantising build that is stopped anywhere: nothing half written is to be seen, nothing piles up, and the same
command again finishes, with the stages that were finished, to the same bytes as a build that nobody stopped."""

import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from tests.support.processes import runs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("interrupted")

SOURCE, QUANTISED = "the source's answers", "the quantised checkpoint"
QUALITY, ENGINE = "the quality figures", "the engine"
# where builds are stopped, one after the other, and what each finds finished
POINTS = [
    ("hashing", "llmops.build.checkpoint.description:sha256_of", []),
    ("loading", "llmops.build.quality.checkpoint_models:open_source", []),
    ("recording", "llmops.build.quality.reference_answers:greedy_decode", []),
    ("recorded", "os:rename", []),
    ("calibrating", "llmops.build.quantize.quantizer:batches", []),
    ("exporting", "llmops.build.quantize.checkpoint_export:rewrite_config", [SOURCE]),
    ("exported", "os:rename", [SOURCE]),
    ("measuring", "llmops.build.quality.export_comparison:golden_agreement", [SOURCE]),
    ("measured", "os:rename", [SOURCE, QUANTISED]),
    ("linking", "llmops.build.targets.pytorch:link_file", [SOURCE, QUANTISED]),
    ("moving", "llmops.build.engine_folder.atomic_folder:replace_folder", [SOURCE, QUANTISED, QUALITY]),
    ("moved", "llmops.build.job.build_engine:remove_stages", [SOURCE, QUANTISED, QUALITY]),
]
# Ctrl-C unwinds the stack in the same way within a stage: once in each shows what it says and leaves
INTERRUPTED = ("hashing", "calibrating", "exporting", "measuring", "linking", "moved")


def command(target, source, output, *more):
    words = ["build", source, "-o", output, "--target", target, "--quant", "fp8", "--calib-size", 2]
    return [*words, "--calib-seq-len", 48, "--max-seq-len", 128, *more]


def contents(folder):
    """Without the lock, which a killed build leaves, locked by nobody."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != f".{folder.name}.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def beside(output):
    """Kinds of what lies next to the output."""
    names = [path.name for path in output.parent.iterdir() if path != output]
    return sorted(name.rpartition(".")[2] for name in names if name.startswith(f".{output.name}."))


def taken(result):
    start = "Taken from an earlier, unfinished build: "
    return [line.removeprefix(start)[:-1] for line in result["err"].splitlines() if line.startswith(start)]


@pytest.fixture(scope="session")
def whole(builder, source, tmp_path_factory):
    """Contents of the engine that an uninterrupted build makes."""
    output = tmp_path_factory.mktemp("whole") / "engine"
    assert builder(*command("pytorch", source, output))["code"] == 0
    return contents(output)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_stopped_at_every_stage(builder, source, whole, tmp_path, number, code):
    output = tmp_path / "engine"
    unfinished = ("hashing", "loading", "recording", "recorded")
    for point, call, finished in POINTS:
        if number == signal.SIGINT and point not in INTERRUPTED:
            continue
        stopped = builder(*command("pytorch", source, output), stop={"call": call, "signal": number})
        assert (point, stopped["code"], taken(stopped)) == (point, code, finished)
        assert output.exists() == (point == "moved")
        if number == signal.SIGINT:
            *before, last = stopped["err"].splitlines()
            assert (last, "Traceback" in "".join(before)) == ("Interrupted.", False)
            assert beside(output) == ([] if point in unfinished else ["stages"])
        else:
            assert beside(output).count("building") <= 1
    again = builder(*command("pytorch", source, output))
    assert (again["code"], "Up to date" in again["out"]) == (0, True)
    assert (contents(output), beside(output)) == (whole, [])


@pytest.fixture(scope="module")
def trtllm(tmp_path_factory):
    """PATH with trtllm-build of TensorRT-LLM 1.2.1 on it."""
    folder = tmp_path_factory.mktemp("bin")
    script = f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("trtllm_build.py")} "$@"\n'
    for name, text in (("trtllm-build", script), ("python3", "#!/bin/sh\necho 1.2.1\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def engine_command(source, output):
    return command("tensorrt", source, output, "--tp", 2)


@pytest.fixture(scope="module")
def whole_engine(builder, source, trtllm, tmp_path_factory):
    """Contents of the engine that trtllm-build makes when nobody stops it."""
    output = tmp_path_factory.mktemp("reference") / "engine"
    assert builder(*engine_command(source, output), env=trtllm)["code"] == 0
    return engine_contents(output)


def stopped_in_trtllm_build(builder, argv, env, tmp_path, number):
    """The command's process group gets the signal while a worker of trtllm-build has half of its engine written."""
    fifo, pid_file = tmp_path / "fifo", tmp_path / "pid"
    os.mkfifo(fifo)
    builder.begin(*argv, env={**env, "HOLD": str(fifo)}, pid_file=str(pid_file))
    with open(fifo) as told:
        workers = [int(word) for word in told.read().split()]
    os.killpg(int(pid_file.read_text()), number)
    result = builder.end()
    wait_until(lambda: not any(runs(pid) for pid in workers), "trtllm-build ends with llmops")
    return result


def engine_contents(folder):
    """All but the log, whose lines come from two workers."""
    return {name: data for name, data in contents(folder).items() if name != "trtllm-build.log"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_trtllm_build(builder, source, trtllm, whole_engine, tmp_path, number):
    output = tmp_path / "engine"
    stopped = stopped_in_trtllm_build(builder, engine_command(source, output), trtllm, tmp_path, number)
    assert stopped["code"] == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert not output.exists()
    if number != signal.SIGKILL:
        assert beside(output) == ["stages"]
    again = builder(*engine_command(source, output), env=trtllm)
    assert (again["code"], taken(again)) == (0, [SOURCE, QUANTISED, QUALITY])
    assert (engine_contents(output), beside(output)) == (whole_engine, [])


def test_resume_killed_in_trtllm_build(builder, source, trtllm, whole_engine, tmp_path):
    output = tmp_path / "engine"
    assert builder(*engine_command(source, output), env={"PATH": "/usr/bin:/bin"})["code"] == 0
    stopped_in_trtllm_build(builder, ["build", "--resume", output], trtllm, tmp_path, signal.SIGKILL)
    refused = builder("repo", output, "-o", tmp_path / "repository")
    assert (refused["code"], f"llmops build --resume {output}" in refused["err"]) == (2, True)
    assert sorted(path.name for path in output.glob(".*")) == [".engine.lock"]
    assert builder("build", "--resume", output, env=trtllm)["code"] == 0
    assert (engine_contents(output), beside(output)) == (whole_engine, [])


def test_disks_that_fill_up(builder, source, tmp_path):
    """Ever larger ones, until the build fits: each is full at another moment."""
    disk, sizes = tmp_path / "disk", range(60, 4000, 240)
    disk.mkdir()
    for size in sizes:
        result = builder(*command("pytorch", source, disk / "engine"), disk={"at": str(disk), "kilobytes": size})
        if result["code"] == 77:
            pytest.skip("mount namespaces are not allowed here")
        left = {Path(path).relative_to(disk).parts[0] for path in result["left"]}
        if result["code"] == 0:
            break
        assert result["code"] == 1, result["err"]
        assert result["err"].splitlines()[-1].startswith(f"Error: {disk} has no room for more"), result["err"]
        assert left <= {".engine.stages"}
        assert not [path for path in result["left"] if path.endswith(".part")]
    assert left == {"engine"}
    assert size > sizes[3]
