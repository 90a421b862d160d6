"""Homes that are not there, caches that cannot be written: it works all the same, or says in a sentence what to set."""

import os
from pathlib import Path

import pytest

from llmops.cache import cache_dir
from llmops.errors import InputError, ResourceError
from llmops.model_repository.server.installation import find_installation

# not even root can make a folder there
NOWHERE = "/proc/nowhere"


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set only TMPDIR, and a home folder that cannot be written."""
    for name in ("LLMOPS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_first_that_can_be_written_is_taken(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = places / f"llmops-cache-{os.getuid()}"
    assert cache_dir() == private
    assert private.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", str(places / "home"))
    assert cache_dir() == places / "home" / ".cache" / "llmops"
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    assert cache_dir() == places / "xdg" / "llmops"
    monkeypatch.setenv("LLMOPS_CACHE", str(places / "own"))
    assert cache_dir() == places / "own"


@pytest.mark.parametrize("variable", ["LLMOPS_CACHE", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("folder", [NOWHERE, "{file}", "{file}/below"])
def test_a_folder_that_was_asked_for_is_not_replaced_by_another(places, monkeypatch, folder, variable) -> None:
    (places / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "xdg"))
    monkeypatch.setenv(variable, folder.format(file=places / "file"))
    with pytest.raises(InputError, match=rf"^The cache folder .* that {variable} names cannot be used \(.*\); make it"):
        cache_dir()
    assert not (places / "xdg").exists()


def test_a_folder_that_others_may_write_is_not_used(places: Path) -> None:
    (places / f"llmops-cache-{os.getuid()}").mkdir()
    (places / f"llmops-cache-{os.getuid()}").chmod(0o777)
    with pytest.raises(ResourceError, match=r"is open to others.*set LLMOPS_CACHE"):
        cache_dir()


def test_the_embedded_server_is_found_with_a_home_that_cannot_be_written(places: Path) -> None:
    pytest.importorskip("pytriton")
    installation = find_installation()
    assert (installation.backends / "python" / "triton_python_backend_stub").exists()


@pytest.mark.parametrize("put", [Path.touch, os.mkfifo])
def test_a_file_in_the_place_of_the_backends_is_one_sentence(tmp_path: Path, monkeypatch, put) -> None:
    """Before the fix, `llmops serve` ended with a traceback."""
    pytest.importorskip("pytriton")
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path))
    put(tmp_path / "triton-backends")
    said = r"triton-backends/.* cannot be created \(Not a directory\); remove any file"
    with pytest.raises(ResourceError, match=said):
        find_installation()


def test_a_folder_in_the_place_of_a_backends_file_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    """Before the fix, `llmops serve` ended with a traceback at each start."""
    pytest.importorskip("pytriton")
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path))
    link = find_installation().backends / "python" / "triton_python_backend_stub"
    link.unlink()
    link.mkdir()
    with pytest.raises(ResourceError, match="triton_python_backend_stub is not a file of Triton's"):
        find_installation()
