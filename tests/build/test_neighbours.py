"""A build leaves alone whatever lies beside an engine folder or stands in its place."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmops.build.engine_folder.atomic_folder import remove_leftovers
from llmops.build.engine_folder.manifest import EngineManifest
from llmops.build.job.build_engine import build
from llmops.build.spec import BuildSpec
from llmops.errors import InputError
from llmops.model_repository.generate import generate_repository, read_engines


@pytest.fixture
def spec(tiny: Path, tmp_path: Path) -> BuildSpec:
    return BuildSpec(checkpoint=str(tiny), output=tmp_path / "out" / "llama-3")


@pytest.mark.parametrize(
    "name",
    [
        ".llama-3.1.0123abcd.building",  # a build of llama-3.1 that runs
        ".llama-3.1.0123abcd.replaced",
        ".llama-3.building",
        ".llama-3.0123abcd.building.bak",
        ".llama-3.0123ABCD.building",
        "llama-3.0123abcd.building",
        ".xllama-3.0123abcd.building",
    ],
)
def test_only_its_own_leftovers_are_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "engine.json").touch()
    remove_leftovers(tmp_path / "llama-3")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "engine.json").exists()


def test_two_engines_whose_names_begin_alike(spec: BuildSpec) -> None:
    """An engine of llama-3.1 that was moved aside does not become llama-3."""
    other = replace(spec, output=spec.output.with_name("llama-3.1"), name="other")
    build(other)
    aside = other.output.rename(other.output.with_name(".llama-3.1.0123abcd.replaced"))
    manifest, cached = build(replace(spec, name="mine"))
    assert (manifest.name, cached) == ("mine", False)
    assert aside.is_dir()
    assert build(other) == (EngineManifest.load(other.output), True)


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "folder", "pipe"])
def test_a_lock_file_that_is_something_else_stays(spec: BuildSpec, tmp_path: Path, kind: str) -> None:
    victim, lock = tmp_path / "victim", spec.output.with_name(".llama-3.lock")
    lock.parent.mkdir()
    victim.write_text("precious")
    {
        "link": lambda: lock.symlink_to(victim),
        "dangling link": lambda: lock.symlink_to(tmp_path / "nothing"),
        "hard link": lambda: os.link(victim, lock),
        "folder": lock.mkdir,
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    with pytest.raises(InputError, match=r"\.llama-3\.lock is not a lock file that llmops wrote; move it away"):
        build(spec)
    assert victim.read_text() == "precious"
    assert lock.is_symlink() or lock.exists()
    assert not (tmp_path / "nothing").exists()
    assert not spec.output.exists()


def test_stages_that_are_a_link(spec: BuildSpec, tmp_path: Path) -> None:
    spec.output.parent.mkdir()
    (tmp_path / "victim" / "data").mkdir(parents=True)
    spec.output.with_name(".llama-3.stages").symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match=r"\.llama-3\.stages is a symbolic link"):
        build(spec)
    assert (tmp_path / "victim" / "data").is_dir()


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_that_is_a_link(spec: BuildSpec, tmp_path: Path, exists: bool) -> None:
    """`current -> v2`: the link stays, v2 is replaced, and both names lock each other out."""
    real = tmp_path / "disk" / "v2"
    real.parent.mkdir()
    if exists:
        build(replace(spec, output=real, max_seq_len=64))
    spec.output.parent.mkdir()
    spec.output.symlink_to(real)
    manifest, cached = build(spec)
    assert (cached, spec.output.is_symlink(), real.is_dir() and not real.is_symlink()) == (False, True, True)
    assert EngineManifest.load(real) == manifest
    assert build(replace(spec, output=real)) == (manifest, True)
    assert [path.name for path in real.parent.iterdir()] == ["v2"]
    assert [path.name for path in spec.output.parent.iterdir()] == ["llama-3"]


def test_a_repository_at_a_link(spec: BuildSpec, tmp_path: Path) -> None:
    build(spec)
    link, real = tmp_path / "repository", tmp_path / "disk" / "repository"
    link.symlink_to(real)
    engines = read_engines([f"tiny={spec.output}"])
    for _ in range(2):
        generate_repository(engines, link)
        assert link.is_symlink()
        assert (real / "tiny").is_dir()
        assert [path.name for path in real.parent.iterdir()] == ["repository"]
