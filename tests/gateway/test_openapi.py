"""schemathesis over our own OpenAPI document: whatever fits the document or nearly does, no answer is a 5xx."""

import asyncio
import re
import threading

import pytest
from hypothesis import HealthCheck, given, settings

from llmops.gateway.app import create_app
from llmops.gateway.http.middleware import GatewayApp
from llmops.gateway.settings import GatewaySettings
from tests.support.gateway_stack import app_client

schemathesis = pytest.importorskip("schemathesis")

schemathesis.checks.load_all_checks()
CONFORMANCE = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
]
EXAMPLES = settings(max_examples=4, database=None, suppress_health_check=list(HealthCheck))


def check(operation, base_url, statuses):
    @EXAMPLES
    @given(operation.as_strategy())
    def send(case):
        answer = case.call(base_url=base_url, timeout=120)
        statuses.append(answer.status_code)
        assert answer.status_code < 500, answer.text
        # whatever the answer is, the document has its status, its media type and its shape
        case.validate_response(answer, checks=CONFORMANCE)
        if answer.status_code >= 400:
            error = set(answer.json()["error"])
            if operation.path.startswith("/v1/messages"):
                assert {"type", "message"} <= error <= {"type", "message", "details"}
            else:
                assert error == {"message", "type", "param", "code"}

    send()


async def test_no_operation_gives_a_5xx(stack):
    stack.say("The capital of France is Paris.")
    document = (await stack.client.get("/openapi.json")).json()
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    paths = ("chat/completions", "responses", "embeddings", "messages", "messages/count_tokens")
    assert {f"POST /v1/{path}" for path in paths} <= {o.label for o in operations}
    statuses: list[int] = []
    for operation in operations:
        # a thread: the gateway runs on this event loop
        await asyncio.to_thread(check, operation, str(stack.client.base_url).rstrip("/"), statuses)
    assert len(statuses) > len(operations)


async def test_the_reference_is_drawn_without_a_network(stack):
    for page, wanted in (("/docs", {"swagger-ui-bundle.js", "swagger-ui.css"}), ("/redoc", {"redoc.standalone.js"})):
        html = (await stack.client.get(page)).text
        assert not re.search(r"(src|href)=.(https?:)?//", html), html
        files = re.findall(r"(?:src|href)=.docs/([^\"' ]+)", html)
        assert set(files) == wanted | {"favicon.png"}
        assert "openapi.json" in html
        for file in files:
            answer = await stack.client.get(f"/docs/{file}")
            assert answer.status_code == 200
            assert len(answer.content) > 1000
    for other in ("core.py", "..%2fcore.py", "redoc.standalone.js.map"):
        assert (await stack.client.get(f"/docs/{other}")).status_code == 404


async def test_every_operation_says_what_it_does_takes_and_gives(stack):
    document = (await stack.client.get("/openapi.json")).json()
    operations = [(path, verb, one) for path, verbs in document["paths"].items() for verb, one in verbs.items()]
    summaries = [one["summary"] for _, _, one in operations]
    assert len(summaries) == len(set(summaries))
    for path, verb, one in operations:
        assert not re.match(r"(Handle|Create|Get|Delete|Cancel|Live|Ready|Metrics)( One)?$", one["summary"]), path
        assert len(one["tags"]) == 1
        assert {part["name"] for part in one.get("parameters", []) if part["in"] == "path"} == set(
            re.findall(r"{(\w+)}", path)
        )
        (content,) = (kind for kind in one["responses"]["200"]["content"] if kind != "text/event-stream")
        if content == "application/json":
            schema = one["responses"]["200"]["content"][content]["schema"]
            assert schema["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]
        if verb == "post" and not path.endswith("/cancel"):
            assert "$ref" in one["requestBody"]["content"]["application/json"]["schema"]


async def test_the_document_is_made_once_beside_the_event_loop(monkeypatch):
    """Before, the first request for it held all others up for 0.3 s."""
    makers: list[int] = []
    make = GatewayApp.openapi
    monkeypatch.setattr(GatewayApp, "openapi", lambda app: makers.append(threading.get_ident()) or make(app))
    async with app_client(create_app(GatewaySettings(triton="127.0.0.1:1"))) as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(4)))
    assert len({answer.content for answer in answers}) == len(makers) == 1
    assert makers[0] != threading.get_ident()
