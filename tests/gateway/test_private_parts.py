"""Private parts of others that are used all the same: a version without them is known by a sentence, not by a crash."""

import pytest

from llmops.errors import ResourceError
from llmops.gateway.http import limited_protocol


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
