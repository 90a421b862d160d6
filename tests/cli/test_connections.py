"""Servers that are away, of another kind, or want a key: a sentence of ours, whatever the library says."""

import asyncio
import json
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from llmops.cli.main import cli
from llmops.errors import LlmopsError
from llmops.gateway.routing.discovery import resolve_addresses
from tests.support.pages import Page, PageServer, Request

AWAY = "127.0.0.1:1"


@pytest.fixture
def http(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return HOST:PORT of a server of HTTP that answers with the status of the test's parameter."""
    page = Page(json.dumps({"error": {"message": "No."}}), getattr(request, "param", 401))
    with PageServer(lambda _: page) as server:
        yield server.address


@pytest.fixture
def no_http() -> Iterator[str]:
    """Return HOST:PORT of a server that answers in another protocol, as a gRPC port does."""

    def answer(request: Request) -> None:
        request.wfile.write(b"\0\0\0\4\0\0\0\0\0")

    with PageServer(answer) as server:
        yield server.address


def said(*arguments: str) -> str:
    """Return the sentence of the error with which a command ends."""
    result = CliRunner().invoke(cli, list(arguments))
    error = result.exception
    text = error.message if isinstance(error, LlmopsError) else result.output
    assert isinstance(error, (LlmopsError, SystemExit)), repr(error)
    assert not text.rstrip().endswith("..")
    assert "Error: Error" not in text
    return text


ASKING = [
    ("chat", "--once", "hi", "--url", "http://{at}/v1"),
    ("bench", "http://{at}/v1"),
    ("verify", "--url", "http://{at}/v1"),
    ("tenant", "list", "--url", "http://{at}"),
]


@pytest.mark.parametrize("arguments", ASKING)
def test_another_protocol_answers(arguments, no_http):
    found = said(*(part.format(at=no_http) for part in arguments))
    assert "does not speak HTTP/1.1. If the port is Triton's gRPC port (8001), use the gateway's" in found


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (AWAY, f"^Nothing answers at http://{AWAY}"),
        ("nowhere.invalid:9000", r"nowhere\.invalid:9000.* is not known to DNS; check its name\."),
    ],
)
@pytest.mark.parametrize("arguments", ASKING)
def test_nothing_listens_or_dns_does_not_know_the_host(arguments, at, words):
    assert re.search(words, said(*(part.format(at=at) for part in arguments)))


IMPOSSIBLE = ["a..b:9000", "[::1:9000", "a]:9000", "127.0.0.1:99999", "127.0.0.1:port", "a:0", ":9000", "a@"]


@pytest.mark.parametrize("at", [f"{'a' * 300}:9000", *IMPOSSIBLE])
@pytest.mark.parametrize(
    "arguments",
    [
        *ASKING,
        ("top", "--once", "--url", "http://{at}"),
        ("safety", "redteam", "--model", "a", "--url", "http://{at}"),
        ("control", "--gateway", "http://{at}"),
        ("serve", "a", "--traces", "http://{at}"),
    ],
)
def test_a_url_that_no_server_can_have(arguments, at):
    assert "is not an HTTP URL (" in said(*(part.format(at=at) for part in arguments))


def test_a_name_that_cannot_be_one_in_dns():
    name = "a" * 300
    assert said("top", "--once", "--url", f"dns:{name}:9000").startswith("No gateway answers; start one")
    # a gateway goes on with its other replicas
    with pytest.raises(OSError, match="not a valid DNS name"):
        asyncio.run(resolve_addresses(name, 9000))


@pytest.mark.parametrize("arguments", [ASKING[0], ASKING[1], ASKING[2]])
def test_a_key_is_asked_for(arguments, http):
    found = said(*(part.format(at=http) for part in arguments))
    assert f"http://{http}/v1 asks for an API key" in found
    assert "set LLMOPS_API_KEY." in found


@pytest.mark.parametrize("http", [403], indirect=True)
def test_top_says_that_the_key_lacks_the_scope(http):
    found = said("top", "--once", "--interval", "100ms", "--url", f"http://{http}")
    assert "asks for a key with the scope metrics: set LLMOPS_API_KEY" in found


@pytest.mark.parametrize("arguments", [("verify", "--triton"), ("bench",)])
def test_triton_on_a_port_of_http(arguments, http):
    address = http if arguments[0] == "verify" else f"grpc://{http}"
    found = said(*arguments, address)
    assert found == f"{http} answers in HTTP and not in gRPC; Triton's gRPC port is 8001 by default."
    away = AWAY if arguments[0] == "verify" else f"grpc://{AWAY}"
    assert said(*arguments, away).startswith(f"No Triton answers at {AWAY}; start one with `llmops serve`")
