"""A repository whose files were changed after it was made: said at each start, refused with --strict."""

import csv
import hashlib
import importlib.util
import io
import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from llmops.build.engine_folder.manifest import EngineManifest, measure_files
from llmops.build.trtllm.container_images import bind_mount
from llmops.cli.main import cli
from llmops.cli.stack import make_repository
from llmops.errors import InputError, ResourceError
from llmops.model_repository.generate import generate_repository, read_engines
from llmops.model_repository.repository.manifest import REPOSITORY_FILE, RepositoryManifest
from llmops.model_repository.repository.validation import check_repository, check_unedited
from llmops.model_repository.server.installation import find_installation
from tests.attacks.test_checkpoints import rewrite
from tests.model_repository.test_generate import make_engine
from tests.support.manifests import engine_manifest

ENGINE = "smollm2-tensorrt_llm"


@pytest.fixture
def copied(repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(repository, tmp_path / "repository", symlinks=True))


def edit_model(folder: Path) -> None:
    path = folder / ENGINE / "1" / "model.py"
    path.write_text(path.read_text() + "\nprint('not ours')\n")


def name_environment(folder: Path) -> None:
    path = folder / ENGINE / "config.pbtxt"
    extra = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/tmp/env.tar.gz" } }\n'
    path.write_text(path.read_text() + extra)


def plant_byte_code(folder: Path) -> None:
    """Put byte code beside the model that Python takes for the model's own, and runs in its place."""
    source = folder / ENGINE / "1" / "model.py"
    other = folder.parent / "other.py"
    other.write_text("print('not ours')\n")
    compiled = bytearray(Path(py_compile.compile(str(other), str(folder.parent / "other.pyc"))).read_bytes())
    status = source.stat()
    compiled[8:16] = struct.pack("<II", int(status.st_mtime), status.st_size)
    target = Path(importlib.util.cache_from_source(str(source)))
    target.parent.unlink()
    target.parent.mkdir()
    target.write_bytes(compiled)
    ran = subprocess.run([sys.executable, "-c", "import model"], cwd=source.parent, capture_output=True, text=True)
    assert ran.stdout == "not ours\n"


@pytest.mark.parametrize("part", ["tokenizer", "model"])
def test_an_engines_folder_that_is_a_link_out_of_it_is_refused(tmp_path: Path, part: str) -> None:
    """Before the fix, the text of a chat template outside was in every prompt, for callers to ask for."""
    engine = make_engine(tmp_path / "engine")
    (tmp_path / "inside").symlink_to(engine)
    assert read_engines([str(tmp_path / "inside")])
    (engine / part).rename(tmp_path / "elsewhere")
    (engine / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leads out of its engine"):
        read_engines([str(engine)])


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_an_engines_tokenizer_file_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    """Before the fix, a repository took 3 GB for a hole, and served the file behind a link."""
    engine = make_engine(tmp_path / "engine")
    with (engine / "tokenizer" / name).open("w") as file:
        file.truncate(3 << 30)
    with pytest.raises(InputError, match="at most 67,108,864 are read; build the engine again"):
        read_engines([str(engine)])
    (engine / "tokenizer" / name).unlink()
    (engine / "tokenizer" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leads out of its engine"):
        read_engines([str(engine)])


def test_an_engine_names_each_file_once(tmp_path: Path) -> None:
    """Before the fix, 300,000 names of one file of 64 MiB held a start up for hours."""
    engine = make_engine(tmp_path / "engine")
    rewrite(engine / "engine.json", contents={"tokenizer/./tokenizer.json": "x"})
    with pytest.raises(InputError, match="a folder inside the engine folder"):
        read_engines([str(engine)])


def test_an_engines_small_files_are_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the fix, holes of 64 MiB held a start up for as long as their author liked."""
    engine = make_engine(tmp_path / "engine")
    contents: dict[str, object] = {"model/a": hashlib.sha256(bytes(10)).hexdigest(), "model/b": "another digest"}
    for name in contents:
        (engine / name).write_bytes(bytes(10))
    with (engine / "model/weights").open("w") as weights:
        weights.truncate(65 << 20)
    rewrite(engine / "engine.json", contents={**contents, "model/weights": 65 << 20})
    monkeypatch.setattr("llmops.build.engine_folder.manifest._MAX_CHECKED", 20)
    with pytest.raises(InputError, match="b is not as the build wrote it"):
        read_engines([str(engine)])
    monkeypatch.setattr("llmops.build.engine_folder.manifest._MAX_CHECKED", 19)
    assert read_engines([str(engine)])
    # Before the fix, a hole in one small file let all others be edited, also with --strict.
    os.truncate(engine / "model/a", 65 << 20)
    with pytest.raises(InputError, match="a is not as the build wrote it"):
        read_engines([str(engine)])
    os.truncate(engine / "model/a", 10)
    # The size of a large file takes no time, so it is always checked: a copy may have stopped early.
    rewrite(engine / "engine.json", contents={**contents, "model/weights": 66 << 20})
    with pytest.raises(InputError, match="weights is not as the build wrote it"):
        read_engines([str(engine)])


@pytest.mark.parametrize(
    "name", ["lora/a/adapter_config.json", "lora_prefetch/1/model.lora_weights.npy", "xgrammar_tokenizer_info.json"]
)
def test_a_changed_adapter_of_an_engine_is_named(tmp_path: Path, name: str) -> None:
    """Before the fix, `serve --strict` served adapters that were edited since `llmops repo`."""
    engine = make_engine(tmp_path / "engine")
    (engine / name).parent.mkdir(parents=True, exist_ok=True)
    (engine / name).write_text("as the build wrote it")
    rewrite(engine / "engine.json", contents=measure_files(engine, "model", "tokenizer"))
    manifest = EngineManifest.load(engine)
    manifest.check_files(engine)
    (engine / name).write_text("edited")
    with pytest.raises(InputError, match=f"{name} is not as the build wrote it"):
        manifest.check_files(engine)
    added = engine / "lora/a/added"
    added.parent.mkdir(parents=True, exist_ok=True)
    added.touch()
    assert manifest.added_files(engine) == ([added] if name.startswith("lora/") else [])


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "a/b", "", ".."])
def test_an_adapter_is_no_folder_elsewhere(name: str) -> None:
    """Before the fix, the server read the adapter's weights there."""
    extra = {"tensorrt_llm": "1.2.1", "llm_args": {}, "adapters": [{"name": name, "id": 1}]}
    with pytest.raises(ValidationError, match="adapters"):
        engine_manifest("pytorch", extra=extra)


def link_model(folder: Path) -> None:
    path = folder / ENGINE / "1" / "model.py"
    path.rename(folder.parent / "elsewhere.py")
    path.symlink_to(folder.parent / "elsewhere.py")


def add_version(folder: Path) -> None:
    """Triton serves the newest version of a model."""
    shutil.copytree(folder / ENGINE / "1", folder / ENGINE / "2")


def add_configuration(folder: Path) -> None:
    (folder / ENGINE / "configs").mkdir()
    shutil.copy(folder / ENGINE / "config.pbtxt", folder / ENGINE / "configs" / "other.pbtxt")


EDITS: dict[str, Callable[[Path], object]] = {
    f"{ENGINE}/1/model.py": edit_model,
    f"{ENGINE}/config.pbtxt": name_environment,
    f"{ENGINE}/1/sitecustomize.py": lambda at: (at / ENGINE / "1/sitecustomize.py").write_text("print('not ours')\n"),
    f"{ENGINE}/1/model.py (link)": link_model,
    f"{ENGINE}/1/__pycache__": plant_byte_code,
    f"{ENGINE}/1/pipe.py": lambda at: os.mkfifo(at / ENGINE / "1/pipe.py"),
    f"{ENGINE}/2/model.py": add_version,
    f"{ENGINE}/configs/other.pbtxt": add_configuration,
    f"{ENGINE}/triton_python_backend_stub": lambda at: (at / ENGINE / "triton_python_backend_stub").write_text("#!"),
    f"{ENGINE}/1/model.py (hole)": lambda at: os.truncate(at / ENGINE / "1/model.py", 1 << 40),
    f"{ENGINE}/3": lambda at: (at / ENGINE / "3").mkdir(),
}


@pytest.mark.parametrize("named", EDITS)
def test_an_edit_is_named_and_refused_where_asked(copied: Path, named: str) -> None:
    assert check_unedited(copied, RepositoryManifest.load(copied), strict=True) == ""
    EDITS[named](copied)
    marker = RepositoryManifest.load(copied)
    first, _, _ = named.partition(" ")
    assert first.rpartition("/")[0] in check_unedited(copied, marker, strict=False)
    with pytest.raises(InputError, match="make it again"):
        check_unedited(copied, marker, strict=True)
    for flags in ((), ("--dry-run",)):
        refused = CliRunner().invoke(cli, ["serve", str(copied), "--strict", *flags])
        assert isinstance(refused.exception, InputError)
        assert "was edited since" in str(refused.exception)


@pytest.mark.parametrize("name", [".", ENGINE, f"{ENGINE}/1/model.py", ".llmops-repository.json"])
def test_a_repository_that_every_user_may_edit_is_refused_where_asked(copied: Path, name: str) -> None:
    """Before the fix, --strict started a server whose code any user could exchange the next moment."""
    (copied / name).chmod(0o777)
    marker = RepositoryManifest.load(copied)
    assert check_unedited(copied, marker, strict=False) == ""
    with pytest.raises(InputError, match="can be edited by other users"):
        check_unedited(copied, marker, strict=True)
    (copied / name).chmod(0o755)
    assert check_unedited(copied, marker, strict=True) == ""


@pytest.mark.parametrize("is_link", [False, True])
def test_a_repository_in_a_folder_that_every_user_may_write_is_refused_where_asked(copied, tmp_path, is_link):
    """Before the fix, any user could put another repository in the place of one that --strict had accepted."""
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    place = open_folder / "repository"
    place.symlink_to(copied) if is_link else copied.rename(place)
    marker = RepositoryManifest.load(place)
    open_folder.chmod(0o777)
    with pytest.raises(InputError, match=f"other users of this machine: {open_folder} is writable"):
        check_unedited(place, marker, strict=True)
    # of a sticky folder, users may only rename what is theirs
    open_folder.chmod(0o1777)
    assert check_unedited(place, marker, strict=True) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(
    "name", ["../folder", "../link", ".", ENGINE, f"{ENGINE}/1/model.py", ".llmops-repository.json"]
)
def test_a_repository_that_belongs_to_another_user_is_refused_where_asked(copied, tmp_path, name):
    """Before the fix, --strict started a server whose code that user could exchange the next moment."""
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o1755)
    link.symlink_to(folder)
    copied.rename(folder / "repository")
    place = link / "repository"
    marker = RepositoryManifest.load(place)
    assert check_unedited(place, marker, strict=True) == ""
    owned = tmp_path / name[3:] if name.startswith("../") else place / name
    os.chown(owned, 65534, -1, follow_symlinks=False)
    assert check_unedited(place, marker, strict=False) == ""
    with pytest.raises(InputError, match="belongs to neither root nor the user who runs llmops"):
        check_unedited(place, marker, strict=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_repository_of_the_user_who_runs_llmops_is_taken(copied, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    os.chown(copied, 65534, -1)
    assert check_unedited(copied, RepositoryManifest.load(copied), strict=True) == ""


@pytest.mark.parametrize("is_link", [False, True])
def test_a_repository_whose_folder_every_user_may_write_is_refused_behind_a_link(copied, tmp_path, is_link):
    (tmp_path / "link").symlink_to(copied)
    copied.chmod(0o777)
    place = tmp_path / "link" if is_link else copied
    with pytest.raises(InputError, match=r"other users of this machine: \. is writable"):
        check_unedited(place, RepositoryManifest.load(place), strict=True)


@pytest.mark.parametrize("name", ["triton_python_backend_utils.py", "sitecustomize.py", ""])
def test_a_backend_that_another_user_put_into_the_cache_is_not_run(tmp_path, monkeypatch, name):
    """Before the fix, a server ran the files that lay in a cache folder which every user may write."""
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path / "cache"))
    backends = find_installation().backends / "python"
    links = {link: link.readlink() for link in backends.iterdir()}
    if not name:
        backends.parent.chmod(0o777)
    else:
        (backends / name).unlink(missing_ok=True)
        (backends / name).write_text("print('not ours')\n")
    if backends / name in links:
        find_installation()
    else:
        with pytest.raises(ResourceError, match=r"can be written by another user|not a file of"):
            find_installation()
        return
    assert {link: link.readlink() for link in backends.iterdir()} == links


def test_what_was_compiled_in_the_cache_is_neither_run_nor_a_reason_to_refuse(tmp_path, monkeypatch):
    """Before the fix, no server started where one had run before: its stub compiles the backend's module."""
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path / "cache"))
    compiled = find_installation().backends / "python/__pycache__"
    compiled.mkdir()
    (compiled / "triton_python_backend_utils.cpython-311.pyc").write_bytes(b"not ours")
    find_installation()
    assert not compiled.exists()


@pytest.mark.parametrize("name", ["a,b", 'a"b', "a,readonly=false"])
def test_dockers_mounts_keep_a_folders_name(name: str) -> None:
    """Before the fix, a comma in a folder's name began another option of the mount."""
    (fields,) = csv.reader(io.StringIO(bind_mount(f"/srv/{name}", "/engine", "readonly"), newline=""))
    assert fields == ["type=bind", f"source=/srv/{name}", "target=/engine", "readonly"]


def test_a_repository_of_somebody_else_is_served_and_not_strictly(copied: Path) -> None:
    (copied / ".llmops-repository.json").unlink()
    marker = RepositoryManifest.load(copied)
    assert check_unedited(copied, marker, strict=False) == ""
    with pytest.raises(InputError, match="was not made by this"):
        check_unedited(copied, marker, strict=True)


def test_a_configuration_of_another_form_is_refused(copied: Path) -> None:
    """Before the fix, a hole of 3 GB in a config.pbtxt ended the process for want of memory."""
    path = copied / ENGINE / "config.pbtxt"
    for spoil in (lambda: os.truncate(path, 3 << 30), lambda: path.write_bytes(b"\xff" * 99)):
        spoil()
        with pytest.raises(InputError, match=r"config\.pbtxt"):
            check_repository(copied)


@pytest.mark.parametrize("letters", ["می\u200cخواهم", "👩\u200d🚀", "❤\ufe0f", "हिन्दी"])
def test_folders_may_have_letters_of_any_language(letters: str, tmp_path: Path) -> None:
    """Before the fix, `llmops repo` made such a repository, and `llmops serve` refused it as edited."""
    engine, repository = make_engine(tmp_path / letters / "engine"), tmp_path / "repository"
    generate_repository(read_engines([str(engine)]), repository)
    served = CliRunner().invoke(cli, ["serve", str(repository), "--dry-run"])
    assert served.exit_code == 0, served.exception


@pytest.mark.parametrize("change", [("$(id)", {}), ("a", {"directory": "/x\ntouch /tmp/theirs"}), ("a\x1b[2J", {})])
def test_a_manifest_puts_no_words_into_scripts(copied: Path, change: tuple[str, dict[str, str]]) -> None:
    """Before the fix, the Slurm script ran the name's `$(id)`, and --dry-run printed the second line as a command."""
    path = copied / REPOSITORY_FILE
    content = json.loads(path.read_text())
    (engine,) = content["engines"].values()
    path.write_text(json.dumps({**content, "engines": {change[0]: {**engine, **change[1]}}}))
    refused = CliRunner().invoke(cli, ["serve", str(copied), "--dry-run"])
    assert isinstance(refused.exception, InputError)
    assert "or edited" in str(refused.exception)


def test_an_engine_leads_to_no_other_repository(tmp_path: Path) -> None:
    """Before the fix, `llmops up` replaced the repository behind a link that had come beside the engine."""
    engine = make_engine(tmp_path / "dist" / "engine")
    production = tmp_path / "production"
    make_repository(make_engine(tmp_path / "own"), production)
    before = sorted(production.rglob("*"))
    (tmp_path / "dist" / "engine-repository").symlink_to(production / "own-repository")
    with pytest.raises(InputError, match="engine-repository is a symbolic link; remove it, or name a folder"):
        make_repository(engine, None)
    assert sorted(production.rglob("*")) == before


def served_engine(folder: Path) -> tuple[Path, Path, RepositoryManifest]:
    """Return an engine that knows its files, a repository that serves it, and its marker."""
    engine, repository = make_engine(folder / "engine"), folder / "repository"
    (engine / "tokenizer/tokenizer_config.json").write_text("{}")
    manifest = EngineManifest.load(engine)
    manifest.model_copy(update={"contents": measure_files(engine, "model", "tokenizer")}).save(engine)
    generate_repository(read_engines([str(engine)]), repository)
    marker = RepositoryManifest.load(repository)
    assert check_unedited(repository, marker, strict=True) == ""
    return engine, repository, marker


@pytest.mark.parametrize(
    "path", ["tokenizer/chat_template.jinja", "model/generation_config.json", "model/1/plugin.so", "model/link"]
)
def test_a_file_that_is_added_to_an_engine_is_named(path: str, tmp_path: Path) -> None:
    """Before the fix, a server started with another chat template, also with --strict."""
    engine, repository, marker = served_engine(tmp_path)
    (engine / path).parent.mkdir(exist_ok=True)
    if path.endswith("link"):
        (engine / path).symlink_to("/")
    else:
        (engine / path).write_text("x")
    assert path in check_unedited(repository, marker, strict=False)
    served = CliRunner().invoke(cli, ["serve", str(repository), "--dry-run", "--strict"])
    assert isinstance(served.exception, InputError)
    assert path in served.exception.message


def change_with_digest(engine: Path) -> None:
    (engine / "tokenizer/tokenizer_config.json").write_text('{"a": 1}')
    manifest = EngineManifest.load(engine)
    manifest.model_copy(update={"contents": measure_files(engine, "model", "tokenizer")}).save(engine)


def change_length(engine: Path) -> None:
    path = engine / "engine.json"
    content = json.loads(path.read_text())
    content["limits"]["max_seq_len"] -= 1
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change", [change_with_digest, change_length, lambda engine: (engine / "engine.json").unlink()]
)
def test_a_changed_engine_json_is_named_until_the_repository_is_made_again(change, tmp_path: Path) -> None:
    """Before the fix, a server started with another chat template or length, also with --strict."""
    engine, repository, marker = served_engine(tmp_path)
    change(engine)
    assert f"{engine}/engine.json changed since" in check_unedited(repository, marker, strict=False)
    served = CliRunner().invoke(cli, ["serve", str(repository), "--dry-run", "--strict"])
    assert isinstance(served.exception, InputError)
    assert "make the repository again with `llmops repo`" in served.exception.message
    if (engine / "engine.json").exists():
        generate_repository(read_engines([str(engine)]), repository)
        assert check_unedited(repository, RepositoryManifest.load(repository), strict=True) == ""


def test_a_dry_run_checks_the_files_of_engines_where_asked(tmp_path: Path) -> None:
    """Before the fix, only the start itself refused a damaged engine."""
    engine, repository, _ = served_engine(tmp_path)
    (engine / "tokenizer/tokenizer_config.json").write_text('{"a": 1}')
    served = CliRunner().invoke(cli, ["serve", str(repository), "--dry-run", "--strict"])
    assert isinstance(served.exception, InputError)
    assert "is not as the build wrote it" in served.exception.message


@pytest.mark.parametrize("owner", [0, 65534])
@pytest.mark.parametrize("name", [".", "model", "model/openvino_model.bin", "tokenizer", "engine.json", "link", "deep"])
def test_an_engine_that_other_users_may_edit_is_refused_where_asked(name: str, owner: int, tmp_path: Path) -> None:
    """Before the fix, --strict started a server whose weights any user could exchange the next moment."""
    engine, repository, marker = served_engine(tmp_path)
    path = engine / name
    if name in ("link", "deep"):
        path, link = tmp_path / "other", engine / ("tokenizer" if name == "deep" else "model/openvino_model.bin")
        link.rename(path)
        link.symlink_to(path)
        path = path / "tokenizer.json" if name == "deep" else path
    if owner and os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    os.chown(path, owner, -1) if owner else path.chmod(path.stat().st_mode | 0o002)
    check_unedited(repository, marker, strict=False)
    with pytest.raises(InputError, match="can be edited by other users"):
        check_unedited(repository, marker, strict=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another group")
@pytest.mark.parametrize("name", [".", "model", "engine.json", ".."])
def test_an_engine_that_a_group_may_edit_is_refused_where_asked(name: str, tmp_path: Path) -> None:
    """Before the fix, members of a shared group could exchange what --strict had checked."""
    engine, repository, marker = served_engine(tmp_path / "own")
    path = (engine / name).resolve()
    path.chmod(path.stat().st_mode | 0o020)
    # with umask 002, a user's private group may write
    check_unedited(repository, marker, strict=True)
    os.chown(path, -1, 100)
    with pytest.raises(InputError, match="writable by others or by a group"):
        check_unedited(repository, marker, strict=True)
    path.chmod(path.stat().st_mode & ~0o020)
    check_unedited(repository, marker, strict=True)


@pytest.mark.parametrize("name", [".", "tokenizer/tokenizer.json", "engine.json", ".."])
def test_an_engine_that_an_access_control_list_opens_is_refused_where_asked(name: str, tmp_path: Path) -> None:
    """Before the fix, a user whom a list lets write passed as the private group, whose bits hold the list's mask."""
    engine, repository, marker = served_engine(tmp_path / "own")
    path = (engine / name).resolve()
    owner, user, group, mask, other = 1, 2, 4, 0x10, 0x20
    entries = [(owner, 7, -1), (user, 7, 65534), (group, 5, -1), (mask, 7, -1), (other, 5, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError:
        pytest.skip("the file system has no access control lists")
    with pytest.raises(InputError, match="writable by others or by a group"):
        check_unedited(repository, marker, strict=True)
    os.removexattr(path, "system.posix_acl_access")
    path.chmod(path.stat().st_mode & ~0o020)
    check_unedited(repository, marker, strict=True)
