"""The stub that the models are type-checked against says what Triton's own module has: asked inside the real Triton."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from llmops.model_repository.launch import Ports, start_triton
from tests.model_repository.test_launch import echo_repository

STUB = Path(__file__).parents[2] / "stubs" / "triton_python_backend_utils.pyi"
# every class of the module, and of the C++ module behind it, by its methods, each with what pybind says of it
ASK = """import c_python_backend_utils, inspect, json, pathlib
        both = {**vars(c_python_backend_utils), **vars(pb_utils)}
        classes = {name: one for name, one in both.items() if inspect.isclass(one)}
        found = {name: {m: getattr(one, m).__doc__ or "" for m in dir(one)} for name, one in classes.items()}
        found["constants"] = [name for name, one in both.items() if isinstance(one, int)]
        pathlib.Path(PATH).write_text(json.dumps(found))"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    root = tmp_path_factory.mktemp("utils")
    answer = root / "answer.json"
    code = ASK.replace("PATH", repr(str(answer)))
    with start_triton(echo_repository(root, initialize=code), ports=Ports(0, 0, 0)) as server:
        server.wait_ready(60)
        return json.loads(answer.read_text())


def stubbed() -> dict[str, dict[str, list[str]]]:
    """Class -> method -> its arguments without self."""
    tree = ast.parse(STUB.read_text())
    return {
        one.name: {
            method.name: [a.arg for a in [*method.args.posonlyargs, *method.args.args] if a.arg != "self"]
            for method in one.body
            if isinstance(method, ast.FunctionDef)
        }
        for one in tree.body
        if isinstance(one, ast.ClassDef)
    }


def arguments(doc: str) -> list[list[str]]:
    """Return the arguments of each overload that pybind lists.

    An overload reads `send(self: …, response: … = None, flags: int = 0) -> None`.
    """
    signatures = re.findall(r"^(?:\d+\. )?\w+\((.*)\) -> ", doc, re.MULTILINE)
    return [[n for n in re.findall(r"(\w+): ", one) if n != "self"] for one in signatures]


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
@pytest.mark.parametrize("name", stubbed())
def test_each_method_is_there_with_these_arguments(real: dict[str, dict[str, str]], name: str) -> None:
    for method, wanted in stubbed()[name].items():
        assert method in real[name], f"{name}.{method}"
        overloads = arguments(real[name][method])
        named = [one for one in overloads if not one or not one[0].startswith("arg")]
        # pybind calls arguments that have no name arg0, arg1 …, those of an instance from arg1 on
        fits = any(one[: len(wanted)] == wanted or (len(one) >= len(wanted) and one not in named) for one in overloads)
        assert fits, f"{name}.{method}{tuple(wanted)} is {real[name][method]!r}"


@pytest.mark.stack
@pytest.mark.xdist_group("stack")
def test_the_flag_of_a_last_response_is_there(real: dict[str, list[str]]) -> None:
    assert "TRITONSERVER_RESPONSE_COMPLETE_FINAL" in real["constants"]
