"""Tests that the contract of gateway and engines is defined once.

It is in llmops/contract.py, which travels with the models.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmops import contract
from llmops.gateway.interfaces import Capabilities, ModelMetadata
from llmops.model_repository.repository.pbtxt import parse_config
from llmops.model_repository.targets import find_target
from tests.model_repository.test_generate import make_engine
from tests.support.model_code import version_folder

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "model_repository"


def test_it_needs_nothing_that_an_image_may_lack() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(sorted(n for n in sys.modules if 'llmops' in n))"
    path = version_folder("tensorrt_llm") / "llmops_contract.py"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code, path], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    assert path.read_bytes() == Path(contract.__file__).read_bytes()


def test_card_and_capabilities_have_the_same_fields_on_both_sides(tmp_path: Path) -> None:
    from llmops.model_repository.generate import model_folders, read_engines

    (entry,) = read_engines([str(make_engine(tmp_path / "engine"))])
    (text,) = [one.config for one in model_folders(entry) if one.name.endswith(contract.ENGINE_SUFFIX)]
    card = json.loads(parse_config(text, "x").parameters[contract.METADATA_PARAMETER].string_value)
    assert list(card) == list(contract.METADATA_FIELDS)
    assert set(ModelMetadata.__dataclass_fields__) - {"extra"} == set(contract.METADATA_FIELDS) - {"contract"}
    assert set(Capabilities.__dataclass_fields__) == set(contract.CAPABILITIES)
    assert set(find_target("openvino").capabilities(entry.manifest)) == set(contract.CAPABILITIES)


# what each model's image has; numpy comes with Triton's Python backend
ALLOWED = {
    # torch: of TensorRT-LLM's own Python
    "tensorrt_llm": "llmops_engine llmops_kv_blocks llmops_process llmops_contract llmops_round_robin xxhash openvino "
                    "openvino_genai torch tensorrt_llm tokenizers",
    "preprocessing": "llmops_preprocessing llmops_contract tokenizers",
    "postprocessing": "llmops_postprocessing llmops_contract tokenizers",
    "embedding": "llmops_contract openvino",
}  # fmt: skip
LIBRARIES = {"openvino.py", "model.py", "sandbox.py", "trtllm_library.py"}


@pytest.mark.parametrize("package", ALLOWED)
def test_what_runs_inside_triton_imports_only_what_is_there(package: str) -> None:
    known = sys.stdlib_module_names | {"numpy", "triton_python_backend_utils"} | {*ALLOWED[package].split()}
    paths = [*(MODELS / package / "1").rglob("*.py")]
    if package == "tensorrt_llm":
        paths += (ROOT / "tests" / "support" / "mock_engine" / "llmops_engine").rglob("*.py")
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            roots = {name.partition(".")[0] for name in names}
            assert roots <= known, f"{path}:{getattr(node, 'lineno', 0)}"
            # the runtimes' libraries are loaded by their own module alone
            assert not roots & {"openvino", "openvino_genai", "tensorrt_llm"} or path.name in LIBRARIES, path
