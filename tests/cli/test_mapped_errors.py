"""Errors of the system and of libraries become our sentences: what happened, why, and what to do.

Servers that answer wrongly are in test_connections.py, click's errors in test_mistakes.py, YAML in
tests/gateway/test_strict_yaml.py, databases in tests/store/test_failures.py.
"""

import os
import re
from pathlib import Path

import grpc
import httpx
import huggingface_hub.errors
import pytest

from llmops.build.checkpoint.hub_download import _call_hub
from llmops.connection_errors import check_url, grpc_call_error, http_connection_error, http_status_error
from llmops.errors import InputError, LlmopsError
from llmops.output_files import check_writable, write_text
from llmops.urls import http_url_problem
from tests.support.load import options


@pytest.mark.parametrize(
    ("path", "why", "advice"),
    [
        ("{folder}/none/x", "No such file or directory", "create the folder first, or name a file in one that exists"),
        ("{folder}/file/x", "Not a directory", "name a file in a folder that exists"),
        ("{folder}", "Is a directory", "name a file in it"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, path: str, why: str, advice: str):
    (tmp_path / "file").touch()
    place = Path(path.format(folder=tmp_path))
    for write in (check_writable, lambda one: write_text(one, "x")):
        with pytest.raises(InputError) as refused:
            write(place)
        assert refused.value.message == f"{place} cannot be written ({why}); {advice}."
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_full_disk():
    with pytest.raises(InputError) as refused:
        write_text(Path("/dev/full"), "x")
    assert refused.value.message == (
        "/dev/full cannot be written (No space left on device); free some space, or name a file on another disk."
    )


def kinds_of(base: type, module: object) -> list[type]:
    """Return the exception classes of a library's module."""
    return [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, base)]


def is_ours(message: str, library: str) -> bool:
    """True for a sentence that ends once, says what to do, and does not show the library's own words."""
    advice = re.search(r"[;:?] ?[\w`]|\. [A-Z]", message)
    return bool(advice) and message.endswith((".", "?")) and ".." not in message and library not in message


@pytest.mark.parametrize(
    "url", ["http://ann:pw@host/v1?key=pw", "http://ann:pw@[", "ann:pw@host", "http://a:p/pw@host"]
)
def test_no_error_shows_the_password_of_a_url(url: str):
    errors = [http_connection_error(url, httpx.ConnectError("")), http_connection_error(url, httpx.ReadTimeout(""))]
    for error in (*errors, *(http_status_error(url, status, "") for status in (401, 403, 404, 429, 500, 503))):
        assert "pw" not in error.message
    if http_url_problem(url):
        with pytest.raises(InputError) as refused:
            check_url(url)
        assert "pw" not in refused.value.message
    assert "pw" not in options(url).public()["url"]


HTTP = [one for one in kinds_of(Exception, httpx) if one not in (httpx.StreamError, httpx.CookieConflict)]


@pytest.mark.parametrize("kind", HTTP, ids=lambda kind: kind.__name__)
def test_every_error_of_the_http_library(kind):
    request = httpx.Request("GET", "http://h:1/v1")
    more = {"request": request, "response": httpx.Response(500)} if kind is httpx.HTTPStatusError else {}
    wordless = ("StreamConsumed", "StreamClosed", "ResponseNotRead", "RequestNotRead")
    error = kind(*(() if kind.__name__ in wordless else ("its own words",)), **more)
    assert is_ours(http_connection_error("http://h:1/v1", error).message, "its own words")


class Call(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "its own words."


@pytest.mark.parametrize("code", grpc.StatusCode, ids=lambda code: code.name)
def test_every_status_of_grpc(code):
    assert is_ours(grpc_call_error("h:8001", Call(code)).message, "StatusCode")


HUB = kinds_of(Exception, huggingface_hub.errors)


@pytest.mark.parametrize("kind", [*HUB, httpx.ReadTimeout, OSError, RuntimeError], ids=lambda kind: kind.__name__)
def test_every_error_of_the_hub(kind):
    error = kind.__new__(kind)
    error.args = ("its first line.\n\nits second line",)

    def download() -> None:
        raise error

    with pytest.raises(LlmopsError) as refused:
        _call_hub("owner/model", download)
    assert is_ours(refused.value.message, "second line")
    assert "owner/model" in refused.value.message
