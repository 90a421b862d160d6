"""Another user of the engine's machine reads what clients asked: from shared memory, or from files."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmops.build.checkpoint.hashing import sha256_of
from llmops.build.engine_folder import atomic_folder
from llmops.build.engine_folder.build_lock import exclusive_build
from llmops.build.job.build_engine import build
from llmops.build.recipes.catalog import recipes
from llmops.build.spec import BuildSpec
from llmops.cache import cached_store
from llmops.cli.accounts.admin_client import default_store
from llmops.cli.stack import build_engine
from llmops.errors import InputError, LlmopsError, ResourceError
from llmops.gateway.app import create_app
from llmops.gateway.conversations.purge import PurgeTask
from llmops.gateway.routing.admission.degradation import LevelFile
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.telemetry.access_log import AccessLogFile
from llmops.gateway.usage.outbox_folders import lock_abandoned_folders, lock_new_folder
from llmops.gateway.usage.usage_check import create_usage_check
from llmops.model_repository.server.shared_memory import SHM_DIR
from llmops.output_files import write_text
from llmops.process import descendants
from llmops.store.factory import open_store
from tests.attacks.harness import record
from tests.support.engine_client import EngineClient, generation
from tests.support.live_process import LLMOPS
from tests.support.tiny_models import write_checkpoint

#: The text of the victim's prompt, as tokens: all of them go through shared memory.
IDS = list(range(700, 900))


def shared_files(pid: int) -> list[Path]:
    """Return the files that a process has open, or mapped, in the folders that all users share."""
    shared = (str(SHM_DIR), tempfile.gettempdir())
    root = Path("/proc", str(pid))
    found = {os.readlink(descriptor) for descriptor in root.joinpath("fd").iterdir()}
    found |= {line.split(maxsplit=5)[-1] for line in root.joinpath("maps").read_text().splitlines()}
    # a checkout may be in a temporary folder, with all that is installed in it
    ours = (str(Path(__file__).parents[2]), sys.prefix)
    shared_ones = (one for one in sorted(found) if one.startswith(shared) and not one.startswith(ours))
    return [Path(one) for one in shared_ones if Path(one).is_file()]


def test_no_umask_lets_every_user_write_what_is_run(tmp_path: Path) -> None:
    """Before the fix, an `llmops` with the umask 0 made a cache and repositories that anyone could write to."""
    command = [*LLMOPS, "recipe", "use", next(iter(recipes())), "-o", str(tmp_path / "made" / "recipe.yaml")]
    (tmp_path / "made").mkdir()
    subprocess.run(command, check=True, umask=0, capture_output=True)
    assert not (tmp_path / "made" / "recipe.yaml").stat().st_mode & stat.S_IWOTH


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
def test_no_file_of_a_server_can_be_read_by_other_users(triton: Any) -> None:
    client = EngineClient(triton.grpc_address)
    try:
        client.send("victim", **generation(IDS, 200, end_id=-1))
        while "output_ids" not in client.receive()[1]:
            pass
        segments = [path for path in SHM_DIR.glob(f"{triton.shm_prefix}*") if path.is_file()]
        processes = [triton.pid, *(process.pid for process in descendants(triton.pid))]
        files = {*segments, *(path for pid in processes for path in shared_files(pid))}
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files if path.exists()}
    finally:
        client.close(cancel=True)
    readable = {name: oct(mode) for name, mode in modes.items() if mode & 0o077}
    record(f"{len(modes)} files, {len(readable)} of them readable by others")
    assert len(segments) >= 3, "each Python model has one"
    assert readable == {}


@pytest.mark.parametrize("planted", ["store.db", "store.db-wal"])
def test_a_store_that_another_user_planted_in_a_shared_cache_is_refused(planted, tmp_path, monkeypatch):
    """Before the fix, conversations were written to a file that every user could read."""
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path))
    tmp_path.chmod(0o1777)
    (tmp_path / planted).touch()
    (tmp_path / planted).chmod(0o666)
    start = partial(create_app, GatewaySettings(triton="127.0.0.1:1"))
    for use in (cached_store, default_store, start):
        with pytest.raises(ResourceError, match=rf"/{planted} can be written by another user, so llmops does not use"):
            use()
    (tmp_path / planted).chmod(0o600)
    assert default_store() == f"sqlite:///{tmp_path}/store.db"
    # an own link leads where the user wants
    (tmp_path / planted).rename(tmp_path / "own")
    (tmp_path / planted).symlink_to("own")
    assert cached_store() == tmp_path / "store.db"


@pytest.mark.parametrize("planted", ["up", "usage"])
def test_folders_that_another_user_planted_in_a_shared_cache_are_refused(planted, tmp_path, monkeypatch):
    """Before the fix, `up` ran the engine in the folder, and usage was written where every user could delete it."""
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path))
    uses = {
        "up": partial(build_engine, "nowhere/checkpoint", "openvino", "int8", 1, None, None),
        "usage": partial(create_usage_check, GatewaySettings(triton="127.0.0.1:1", store=f"sqlite:///{tmp_path}/a.db")),
    }
    (tmp_path / planted).mkdir()
    (tmp_path / planted).chmod(0o777)
    with pytest.raises(ResourceError, match=rf"/{planted} can be written by another user, so llmops does not use"):
        uses[planted]()


def test_a_digest_that_another_user_planted_in_a_shared_cache_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMOPS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.bin"
    file.write_bytes(b"weights")
    digest = sha256_of(file)
    [record] = (tmp_path / "cache" / "sha256").iterdir()
    record.write_text(record.read_text().replace(digest, "0" * 64))
    assert sha256_of(file) == "0" * 64, "an own record is used"
    others = os.getuid() + 1
    if os.getuid():
        monkeypatch.setattr("os.getuid", lambda: others)
    else:
        os.chown(record, others, -1)
    assert sha256_of(file) == digest


def give_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file to another user, or let it look so where this user may not."""
    others = os.getuid() + 1
    if os.getuid():
        lstat, changed = Path.lstat, SimpleNamespace(st_uid=others, st_mode=path.lstat().st_mode)
        monkeypatch.setattr(Path, "lstat", lambda one: changed if one == path else lstat(one))
    else:
        os.chown(path, others, -1, follow_symlinks=False)


@pytest.mark.parametrize("linked", [False, True])
async def test_a_store_that_another_user_put_into_a_sticky_folder_is_refused(linked, tmp_path, monkeypatch):
    """Before the fix, a store that is named explicitly was used with the other user's administrators."""
    folder, target = tmp_path / "shared", tmp_path / "target.db"
    folder.mkdir()
    store = folder / "store.db"
    url = f"sqlite:///{store}"
    if linked:
        store.symlink_to(target)
    await (await open_store(url)).close()
    give_to_another(store, monkeypatch)
    await (await open_store(url)).close()  # a mounted volume of another user
    folder.chmod(0o1777)
    with pytest.raises(ResourceError, match=r"store\.db was made by another user in a folder that all"):
        await open_store(url)


@pytest.mark.parametrize("planted", ["-journal", "-wal", "-shm"])
async def test_a_journal_that_another_user_put_beside_a_store_is_refused(planted, tmp_path, monkeypatch):
    """Before the fix, SQLite replaced the store by what the journal held: the other user's key was an admin's."""
    store = tmp_path / "store.db"
    url = f"sqlite:///{store}"
    await (await open_store(url)).close()
    side = Path(f"{store}{planted}")
    side.touch()
    give_to_another(side, monkeypatch)
    with pytest.raises(ResourceError, match=rf"store.db{planted} was made by another user than the store"):
        await open_store(url)
    if os.getuid() == 0:
        os.chown(store, 1, -1)  # root administers a user's store
        await (await open_store(url)).close()


async def purge_into(folder: Path) -> None:
    async def nothing(*_: object) -> int:
        return 0

    async def store() -> Any:
        return SimpleNamespace(prune=nothing)

    await PurgeTask(store, folder).purge()


#: What a server does with a path in its settings, and whether the path is a folder.
USES = {
    "outbox": (lambda path: lock_new_folder(path / "store").remove(), True),
    "archive": (lambda path: asyncio.run(purge_into(path)), True),
    "access log": (lambda path: AccessLogFile(str(path)).close(), False),
    "pipe": (lambda path: write_text(path, "x"), False),
}


@pytest.mark.parametrize("how", ["made", "linked", "parent"])
@pytest.mark.parametrize("mode", [0o1777, 0o777])
@pytest.mark.parametrize("use", USES)
def test_what_another_user_put_at_a_path_of_the_settings_is_refused(use, mode, how, tmp_path, monkeypatch):
    """Before the fix, the events in another user's outbox were billed, and that user read the access log."""
    start, is_folder = USES[use]
    shared = tmp_path / "shared"
    path = shared / "planted" / "below" if how == "parent" else shared / "planted"
    path.parent.mkdir(parents=True)
    target = tmp_path / "target" if how == "linked" else path
    target.mkdir() if is_folder else target.touch()
    if use == "pipe":
        target.unlink()
        os.mkfifo(target)
        reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    if how == "linked":
        path.symlink_to(target)
    give_to_another(shared / "planted", monkeypatch)
    start(path)  # a mounted volume of another user
    target.mkdir(exist_ok=True) if is_folder else None
    shared.chmod(mode)
    with pytest.raises((PermissionError, LlmopsError), match="planted was made by another user in a folder that all"):
        start(path)
    if use == "pipe":
        os.close(reader)


def test_no_access_log_is_made_behind_the_link_of_another_user(tmp_path, monkeypatch):
    (tmp_path / "planted").symlink_to(tmp_path / "target")
    give_to_another(tmp_path / "planted", monkeypatch)
    tmp_path.chmod(0o1777)
    with pytest.raises(ResourceError, match="planted was made by another user"):
        AccessLogFile(str(tmp_path / "planted"))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("planted", ["gw-1", "gw-1/outbox.db"])
def test_an_outbox_with_what_another_user_put_there_is_not_delivered(planted, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "gw-1"
    folder.mkdir()
    (folder / "outbox.db").touch()
    give_to_another(tmp_path / planted, monkeypatch)
    [found] = lock_abandoned_folders(tmp_path)
    found.release()
    (tmp_path / planted).parent.chmod(0o777)
    assert list(lock_abandoned_folders(tmp_path)) == []
    assert f"{planted} was made by another user in a folder that all may write to); move it" in caplog.text


def test_levels_and_folders_that_another_user_put_there_are_not_used(tmp_path, monkeypatch, caplog):
    (tmp_path / "levels").write_text("4")
    (tmp_path / "up").mkdir()
    tmp_path.chmod(0o1777)
    levels = LevelFile(tmp_path / "levels")
    give_to_another(tmp_path / "levels", monkeypatch)
    levels.reload()
    assert levels.level("m") is None
    assert "levels was made by another user in a folder that all may write to" in caplog.text
    give_to_another(tmp_path / "up", monkeypatch)
    with pytest.raises(InputError, match="up was made by another user in a folder that all may write to"):
        build_engine("nowhere/checkpoint", "openvino", "int8", 1, None, tmp_path / "up")


@pytest.mark.parametrize("planted", ["engine", "a link", ".engine.lock", ".engine.stages"])
def test_what_another_user_put_at_an_output_in_a_sticky_folder_is_refused(planted, tmp_path, monkeypatch):
    """Before the fix, a build took another user's engine or weights for its own, or waited for his lock for ever."""
    folder, source = tmp_path / "shared", write_checkpoint(tmp_path / "checkpoint", "llama")
    path = folder / ("engine" if planted == "a link" else planted)
    folder.mkdir()
    path.symlink_to(tmp_path) if planted == "a link" else path.touch() if planted.endswith("lock") else path.mkdir()
    give_to_another(path, monkeypatch)
    folder.chmod(0o1777)
    with pytest.raises(InputError, match=f"{path.name} was made by another user in a folder that all may write to"):
        build(BuildSpec(str(source), folder / "engine"))
    assert sorted(one.name for one in folder.iterdir()) == [path.name]


def test_an_old_engine_that_another_user_put_beside_an_output_is_not_put_back(tmp_path, monkeypatch):
    """Before the fix, a build took another user's engine for its own."""
    monkeypatch.setattr(atomic_folder, "is_put_by_another", lambda path: path.name.startswith(".engine.a"))
    for name in (".engine.aaaaaaaa.replaced", ".engine.bbbbbbbb.replaced"):
        (tmp_path / name / name).mkdir(parents=True)
    atomic_folder.remove_leftovers(tmp_path / "engine")
    assert [path.name for path in (tmp_path / "engine").iterdir()] == [".engine.bbbbbbbb.replaced"]


def test_the_lock_of_a_build_is_not_readable_by_others(tmp_path: Path) -> None:
    """Before the fix, any user could hold the lock that a killed build had left, and later builds waited for ever."""
    with exclusive_build(tmp_path / "engine", print):
        assert stat.S_IMODE((tmp_path / ".engine.lock").stat().st_mode) == 0o600
