"""schemathesis over our own OpenAPI document: whatever fits the document or nearly does, no answer is a 5xx."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = settings(max_examples=15, database=None, suppress_health_check=list(HealthCheck))


def check(operation, base_url, statuses):
    @EXAMPLES
    @given(operation.as_strategy())
    def send(case):
        answer = case.call(base_url=base_url, timeout=120)
        statuses.append(answer.status_code)
        assert answer.status_code < 500, answer.text
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
    assert len(statuses) > 5 * len(operations)
