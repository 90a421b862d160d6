"""Private parts of others that are used all the same: a version without them is known by a sentence, not by a crash."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmops.errors import ResourceError
from llmops.gateway.http import limited_protocol

PATTERNS = Path(__file__).parents[2] / "gateway/generation/structured/grammar/regex_parser.py"


@pytest.mark.parametrize(
    ("kind", "names"),
    [(HttpToolsProtocol, limited_protocol.PROTOCOL_MEMBERS), (RequestResponseCycle, limited_protocol.CYCLE_MEMBERS)],
)
def test_uvicorn_has_what_is_used_of_it(kind, names):
    missing = limited_protocol.missing_members(kind, names)
    assert not missing, (
        f"uvicorn {version('uvicorn')} has no {kind.__name__}.{', '.join(missing)}: see "
        "gateway/http/limited_protocol.py and "
        "chunked_writer.py, then move the pin in pyproject.toml."
    )


def test_a_uvicorn_without_it_is_refused_in_one_sentence(monkeypatch):
    class RequestResponseCycle:
        """A cycle of a hypothetical newer release, without `flow`."""

        def __init__(self) -> None:
            self.transport = self.disconnected = self.chunked_encoding = self.response_complete = None

        async def send(self, message) -> None:
            pass

    monkeypatch.setattr(limited_protocol, "RequestResponseCycle", RequestResponseCycle)
    with pytest.raises(
        ResourceError, match=r"^uvicorn \S+ has no RequestResponseCycle\.flow, which the gateway needs;"
    ):
        limited_protocol.check_uvicorn_internals()


def test_python_has_the_parser_of_regular_expressions_that_grammars_are_made_with():
    old = sys.version_info < (3, 11)
    parser = importlib.import_module("sre_parse" if old else "re._parser")
    opcodes = importlib.import_module("sre_constants" if old else "re._constants")
    used = set(re.findall(r"\bsre\.([A-Z_]+)", PATTERNS.read_text()))
    missing = [name for name in sorted(used) if not hasattr(opcodes, name)]
    assert len(used) > 20
    told = "see gateway/generation/structured/grammar/regex_parser.py, then move requires-python in pyproject.toml."
    assert not missing, f"Python {sys.version.split()[0]} has no re._constants.{', '.join(missing)}: {told}"
    assert hasattr(parser, "parse"), f"Python {sys.version.split()[0]} has no re._parser.parse: {told}"
    shape = [(str(op), value) for op, value in parser.parse("^a[b-d]{2}$")]
    repeated = shape[2][1]
    assert [op for op, _ in shape] == ["AT", "LITERAL", "MAX_REPEAT", "AT"], (
        f"re._parser.parse says something else: {told}"
    )
    assert (repeated[0], repeated[1]) == (2, 2)
