"""Private parts of others that are used all the same: a version without them is known by a sentence, not by a crash."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmops.errors import ResourceError
from llmops.gateway.http import limited_protocol


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
