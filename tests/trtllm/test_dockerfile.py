"""Dockerfile.trtllm, whose instructions run in a folder laid out like upstream's image."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmops.build.environment import TRTLLM_PYTHON
from llmops.build.trtllm.container_images import DEFAULT_TAG, IMAGES, OWN_TAG
from llmops.cli.main import cli
from llmops.model_repository.doctor import deep, launch_commands
from llmops.model_repository.multi_gpu import launch_plan
from llmops.model_repository.server.installation import find_installation
from tests.support.commands import llmops
from tests.trtllm.image_folder import ImageFolder, interpreter_of

pytestmark = [pytest.mark.stack, pytest.mark.xdist_group("stack")]
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile.trtllm").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)).splitlines()


def arguments(name: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in INSTRUCTIONS if line.startswith(f"{name} ")]


def test_every_path_and_version_is_a_fact_of_the_image() -> None:
    """`BASE` names a stage; a stage is an image of the table, and says nothing that its row does not."""
    given = dict(one.split("=") for one in arguments("ARG") if "=" in one)
    assert given == {"BASE": f"triton-{DEFAULT_TAG}", "RELEASE": IMAGES[OWN_TAG].tensorrt_llm}
    for image in (IMAGES[DEFAULT_TAG], IMAGES[OWN_TAG]):
        reference, body = stages()[image.stage].replace("${RELEASE}", given["RELEASE"]).split("\n", 1)
        assert reference == (image.base or image.reference)
        labels = dict(re.findall(r'(\S+)="([^"]*)"', body))
        assert (labels["llmops.tensorrt-llm"], labels["llmops.triton"]) == (image.tensorrt_llm, image.triton)
        variables = dict(re.findall(r"(LLMOPS_\w+)=(\S+)", body))
        wanted = {
            "LLMOPS_IMAGE": image.tag,
            "LLMOPS_BASE_TENSORRT_LLM": image.tensorrt_llm,
            "LLMOPS_BASE_PYTHON": image.layout.python,
            "LLMOPS_PYTHON": image.layout.ours,
        }
        other = {} if image.layout.ours == image.layout.python else {TRTLLM_PYTHON: image.layout.python}
        assert variables == {**wanted, **other}
        needed = re.findall(r"openai==(\S+)", body)
        assert needed == ([image.openai_needed] if image.openai_needed else [])
    assert json.loads(arguments("ENTRYPOINT")[0])[0] == IMAGES[DEFAULT_TAG].layout.entrypoint
    recipe = IMAGES[OWN_TAG].recipe(IMAGES[OWN_TAG].own)
    assert recipe.split()[4:6] == ["--build-arg", f"BASE={IMAGES[OWN_TAG].stage}"]


IMAGE = IMAGES[DEFAULT_TAG]


def built(folder: Path, change: Callable[[str], str] = lambda line: line) -> ImageFolder:
    """The image that the default stage and the last one make, of instructions that `change` may spoil."""
    last = INSTRUCTIONS.index("FROM ${BASE}")
    own = stages()[IMAGE.stage].split("\n")[1:]
    image = ImageFolder(folder, IMAGE)
    image.build([change(line) for line in [*own, *INSTRUCTIONS[last:]]], {})
    return image


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    return built(tmp_path_factory.mktemp("image"))


def test_the_instructions_run_in_a_folder_laid_out_like_upstreams(image: ImageFolder) -> None:
    """The server and its health check start under the Python that has llmops and the library."""
    check = arguments("HEALTHCHECK")[0]
    python = json.loads(check[check.index("CMD") + 4 :])[0]
    assert interpreter_of(image.environment, python) == str(image.at(IMAGE.layout.python).with_name(python))
    assert Path(interpreter_of(image.environment, "llmops")).parent == image.at(IMAGE.layout.python).parent
    code = "import llmops.model_repository.server.drain as d, tensorrt_llm; print(d.__file__, tensorrt_llm.__version__)"
    file, version = image.run(f"{python} -c '{code}'").split()
    assert Path(file).is_relative_to(image.site)
    assert version == IMAGE.tensorrt_llm
    assert not list(image.at("/src").glob("*"))
    assert image.at("/home/llmops").stat().st_mode & 0o1777 == 0o1777
    home = image.environment["HOME"]
    assert (home, image.environment["USER"]) == (str(image.at("/home/llmops")), "llmops")


def test_the_last_step_sees_everything_of_the_image(image: ImageFolder) -> None:
    """`llmops doctor --deep`, with the stand-in as the library and the wheel's Triton as the server."""
    found = dict(reversed(re.split(r" {2,}", line)[:2]) for line in image.said.splitlines())
    assert set(found.values()) == {"seen"}
    assert found.keys() >= {
        "import tensorrt_llm.serve.responses_utils", "LlmArgs: kv fp8, tp 8, experts, Eagle3", "KvCacheConfig",
        "SamplingParams: regex", "QuantConfig: W4A8_AWQ", "backend: libtriton_tensorrtllm.so", "tritonserver",
        "config.pbtxt: tensorrt, served by nvidia", "config.pbtxt: tensorrt, served by llmops",
        "config.pbtxt: pytorch", "version of openai", "the executor's bindings", "ExecutorConfig: everything",
        "ExecutorConfig: lookahead", "executor's Request: everything",
    }  # fmt: skip


def tried(image: ImageFolder) -> dict[str, str]:
    """Return the deep check's findings about the library, by name."""
    found = deep.check_python_library(IMAGE, image.root, str(image.at(IMAGE.layout.python)))
    return {one.name: one.outcome for one in found}


@pytest.mark.parametrize(
    ("module", "text", "outcome"),
    [
        # the image's own openai: server r26.07 python/openai/requirements.txt:32 has 1.107.3
        ("openai/types/responses/response_content_part_added_event.py", "", "failed"),
        ("tensorrt_llm/serve/responses_utils.py", "import ctypes; ctypes.CDLL('libcuda.so.1')", "needs a GPU"),
        ("tensorrt_llm/serve/responses_utils.py", "import ctypes; ctypes.CDLL('libnccl-none.so.2')", "failed"),
        ("tensorrt_llm/serve/responses_utils.py", "raise SystemExit('broken')", "failed"),
    ],
)
def test_only_the_drivers_libraries_may_be_missing(image: ImageFolder, module: str, text: str, outcome: str) -> None:
    path = image.site / module
    before = path.read_text()
    # of another size, so that Python does not take the compiled file for it
    path.write_text(f"{text}\n\n")
    try:
        found = tried(image)
    finally:
        path.write_text(before)
    assert found["import tensorrt_llm._torch.pyexecutor.py_executor"] == outcome
    assert found["import tensorrt_llm.llmapi"] == "seen"


@pytest.mark.parametrize(
    ("said", "outcome", "detail"),
    [
        ("\tlibc.so.6 => /lib/libc.so.6 (0x1)\n", "seen", "all shared libraries"),
        ("\tlibcuda.so.1 => not found\n\tlibnvidia-ml.so.1 => not found\n", "needs a GPU", "libcuda.so.1, libnv"),
        ("\tlibcuda.so.1 => not found\n\tlibnvinfer.so.10 => not found\n", "failed", "does not find libnvinfer"),
        (
            "undefined symbol: _ZN3foo\t(./x.so)\n",
            "failed",
            "no library has the symbol _ZN3foo (1 missing symbols in all): build the image again from an "
            "unchanged base",
        ),
    ],
)
def test_what_the_loader_says_of_the_backend(said: str, outcome: str, detail: str) -> None:
    found = deep.parse_ldd_output("x.so", said, IMAGE)
    assert (found.outcome, detail in found.detail) == (outcome, True)


def test_the_embedded_triton_reads_the_models_and_answers() -> None:
    pytest.importorskip("pytriton")
    found = {one["name"]: one["outcome"] for one in json.loads(llmops("doctor", "--deep", "--json").output)["found"]}
    pairs = ("tensorrt, served by nvidia", "tensorrt, served by llmops", "pytorch")
    modes = ("single", "leader", "orchestrator")
    wanted = (*(f"config.pbtxt: {one}" for one in pairs), *(f"command line: {one}" for one in modes), "tritonserver")
    assert found == dict.fromkeys(wanted, "seen")


@pytest.mark.parametrize(
    ("option", "complaint"), [("--no-such-option=1", "unrecognized option"), ("--log-verbose=high", "Got high")]
)
def test_an_option_that_triton_does_not_have(option: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is in the middle of a follower's command, which mpirun would start last."""
    pytest.importorskip("pytriton")
    (leader,) = [plan for plan in launch_commands.PLANS if plan.mode == "leader"]
    follower = launch_plan.follower_command
    monkeypatch.setattr(launch_plan, "follower_command", lambda *given: [*follower(*given), option, "--log-verbose=0"])
    with pytest.raises(ValueError, match=complaint):
        launch_commands.parse_launch_commands(find_installation(), leader)


def stages() -> dict[str, str]:
    """name -> what follows FROM, the reference first."""
    found: dict[str, str] = {}
    for line in INSTRUCTIONS:
        if line.startswith("FROM "):
            reference, _, name = line.removeprefix("FROM ").partition(" AS ")
            found[name] = reference
        elif found:
            found[name] += f"\n{line}"
    return found


def test_it_runs_as_nobody_special_and_is_reachable() -> None:
    assert arguments("USER") == ["10001"]
    assert "useradd --create-home --uid 10001" in arguments("RUN")[-2]
    assert arguments("RUN")[-1] == "llmops doctor --deep"
    assert json.loads(arguments("ENTRYPOINT")[0])[-1] == "llmops"
    command = json.loads(arguments("CMD")[0])
    serve = cli.get_command(None, command[0])
    context = serve.make_context("serve", command[1:], resilient_parsing=True)
    assert context.params["host"] == "0.0.0.0"
    assert set(arguments("EXPOSE")[0].split()) == {str(context.params[f"{one}_port"]) for one in ("grpc", "metrics")}
    check = arguments("HEALTHCHECK")[0]
    python, flag, code = json.loads(check[check.index("CMD") + 4 :])
    assert (python, flag) == ("python3", "-c")
    assert f"127.0.0.1:{context.params['grpc_port']}" in code
    # nothing listens here on a port that was free a moment ago
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = code.replace(str(context.params["grpc_port"]), str(port))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
