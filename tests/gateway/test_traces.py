"""Traces: what a receiver of OpenTelemetry's protocol gets to see of requests, and what it never gets."""

import asyncio
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from tritonclient.grpc import service_pb2

from llmops.distribution import install_command
from llmops.errors import InputError, MissingDependencyError
from llmops.gateway.app import create_app
from llmops.gateway.http import telemetry_checks
from llmops.gateway.settings import GatewaySettings, load_settings
from llmops.gateway.telemetry.otlp_exporter import OtlpSpanExporter
from llmops.gateway.telemetry.trace_context import TraceContext, parse_traceparent
from llmops.gateway.triton.encoder_client import TritonEncoder
from llmops.gateway.triton.model_metadata import EncoderMetadata
from tests.gateway.test_seams import Engine
from tests.support.gateway_stack import become, card_of, in_front_of, running
from tests.support.otlp_receiver import Receiver, Told, covered, receiving
from tests.support.scripted_triton import ScriptedTriton, Step
from tests.support.waiting import eventually

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
STAGES = ["route", "queue", "template", "tokenise", "schedule"]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(telemetry_checks, "TRACE_EXPORT_INTERVAL", 0.01)


@pytest.fixture
def receiver():
    with receiving() as one:
        yield one


def tracing(receiver: Receiver, card, tokenizer, ratio: float = 1.0, **settings):
    return running(card, tokenizer, traces={"endpoint": receiver.url, "ratio": ratio}, **settings)


async def one_trace(receiver: Receiver) -> tuple[Told, dict[str, Told]]:
    """The request's own span, and all others by name, of the only trace that comes."""
    await eventually(lambda: receiver.spans)
    (spans,) = receiver.traces().values()
    (root,) = [span for span in spans if span.name.startswith("POST ")]
    return root, {span.name: span for span in spans if span is not root}


# -- which trace ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        (SAMPLED, True), (UNSAMPLED, False), (f"00-{TRACE}-{SPAN}-03", True), (f"00-{TRACE}-{SPAN}-fe", False),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True), (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}-01-more", None), (f"cc-{TRACE}-{SPAN}-01.more", None),
        (f"00-{'0' * 32}-{SPAN}-01", None), (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None), (f"00-{TRACE}-{SPAN}-01\n", None), (f"00-{TRACE}-{SPAN}-1", None),
        (f"cc-{TRACE}-{SPAN}-01-" + "x" * 600, None), ("", None), ("\xff\x00", None),
    ],
)  # fmt: skip
def test_a_traceparent_is_taken_as_the_recommendation_has_it(given, sampled):
    parent = parse_traceparent([(b"host", b"a"), (b"traceparent", given.encode("latin-1"))])
    trace = TraceContext(parent)
    assert (trace.sampled if parent else None) == sampled
    assert (trace.trace_id, trace.parent_id) == ((TRACE, SPAN) if parent else ("", ""))


_hex = st.text("0123456789abcdefAF", min_size=1, max_size=34)


@given(st.one_of(st.lists(_hex, min_size=3, max_size=6).map("-".join), st.text("0123456789abcdef-", max_size=60)))
def test_opentelemetrys_own_reader_agrees(text):
    theirs = otel.get_current_span(TraceContextTextMapPropagator().extract({"traceparent": text})).get_span_context()
    assert bool(parse_traceparent([(b"traceparent", text.encode())])) == theirs.is_valid


# -- what is sent ---------------------------------------------------------------------------------------------------
async def test_a_sampled_answer_is_told_whole(card, tokenizer, receiver):
    async with tracing(receiver, card, tokenizer, ratio=0.0) as stack:
        ids = stack.say("Hello world!", wait=0.02)
        body = {**stack.chat_body, "stream": True}
        headers = {"traceparent": SAMPLED, "x-request-id": "mine"}
        assert (await stack.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        root, others = await one_trace(receiver)
        (asked,) = stack.triton.requests
    assert receiver.paths == {"/v1/traces"}
    assert (root.service, root.name, root.kind) == ("llmops-gateway", "POST /v1/chat/completions", 2)
    assert (root.trace, root.parent, root.failed) == (TRACE, SPAN, False)
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.scheme": "http",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "llmops.request_id": "mine",
        "llmops.outcome": "good",
    }
    call = others["chat tiny"]
    assert set(others) == {*STAGES, "chat tiny", "prefill", "decode", "stream"}
    assert all(others[name].parent == root.id for name in [*STAGES, "chat tiny", "stream"])
    assert all(others[name].parent == call.id for name in ("prefill", "decode"))
    first = call.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "nvidia.triton",
        "gen_ai.request.model": "tiny",
        # conditionally required of a stream: model/gen-ai/spans.yaml of semantic conventions 1.41
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(asked["input_ids"]),
        "gen_ai.usage.output_tokens": len(ids),
    }
    assert others["prefill"].end - others["prefill"].start == pytest.approx(first * 1e9, abs=2e3)
    assert others["decode"].end - root.start >= 0.02e9 * len(ids)
    assert covered(root, list(others.values())) >= 0.95
    # Triton's own spans belong below the call
    assert dict(asked["metadata"])["traceparent"] == f"00-{TRACE}-{call.id}-01"


async def test_an_encoders_calls_carry_the_trace_too():
    asked: list[tuple] = []

    async def infer(request, *metadata):
        asked.append(metadata)
        return service_pb2.ModelInferResponse(raw_output_contents=[bytes(4 * request.inputs[0].shape[0])])

    encoder = TritonEncoder(infer, "tiny-embedding", EncoderMetadata("tiny", "openvino", "", 2, 8, 300, 1))
    await encoder.run([[1], [2], [3]], trace=SAMPLED)
    await encoder.run([[1]])
    assert asked == [((("traceparent", SAMPLED),),)] * 2 + [()]


async def test_only_what_is_remarkable_is_told_of_the_rest(card, tokenizer, receiver):
    async with tracing(receiver, card, tokenizer, ratio=0.0) as stack:
        stack.say("Hello world!")
        assert (await stack.client.get("/health/ready")).status_code == 200
        for headers in ({}, {"traceparent": UNSAMPLED}, {"traceparent": f"ff-{TRACE}-{SPAN}-01"}):
            body = stack.chat_body
            assert (await stack.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await stack.chat(model="other")).status_code == 404
        stack.steps(Step((5,)), Step(error="out of memory"))
        assert (await stack.chat()).status_code == 500
        root, others = await one_trace(receiver)
        assert all("traceparent" not in dict(asked["metadata"]) for asked in stack.triton.requests)
    assert (root.failed, others["chat tiny"].failed) == (True, True)
    assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (500, "500")
    assert covered(root, list(others.values())) >= 0.95


async def test_a_slow_answer_is_told_with_what_took_so_long(card, tokenizer, receiver):
    async with tracing(receiver, card, tokenizer, ratio=0.0, slo={"ttft_p95": "20ms"}) as stack:
        stack.say("Hello", wait=0.1)
        await stack.client.post("/v1/chat/completions", json=stack.chat_body, headers={"traceparent": UNSAMPLED})
        root, others = await one_trace(receiver)
    assert (root.trace, root.parent, root.failed, root.attributes["llmops.outcome"]) == (TRACE, SPAN, False, "late")
    assert others["prefill"].end - root.start >= 0.1e9


async def test_an_answer_that_went_on_elsewhere_is_told_with_where_and_why(tokenizer_dir, tokenizer, receiver):
    card = {**card_of(tokenizer_dir, tokenizer), "max_seq_len": 4096, "batch_invariant": True}
    engine = Engine(tokenizer)
    engine.cut = 3
    tritons = [ScriptedTriton(card, engine), ScriptedTriton(card, engine)]
    async with in_front_of(*tritons, traces={"endpoint": receiver.url, "ratio": 0.0}) as (client, _):
        await become(client, "ready", "ready")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        assert (await client.post("/v1/chat/completions", json=chat)).headers["x-llmops-continued"] == "exact"
        root, others = await one_trace(receiver)
    first, second = (one.address for one in sorted(tritons, key=lambda one: len(one.requests[0]["input_ids"])))
    move, call = others["continue"], others["chat tiny"]
    assert (root.failed, move.parent) == (False, call.id)
    assert others["decode"].start <= move.start <= move.end <= others["decode"].end
    replicas = {"llmops.replica.from": first, "llmops.replica.to": second}
    assert move.attributes == {"llmops.reason": "lost", **replicas}
    assert (call.attributes["llmops.replica"], call.attributes["llmops.continued"]) == (second, "exact")


async def test_no_text_and_no_key_is_ever_told(card, tokenizer, receiver):
    async with tracing(receiver, card, tokenizer) as stack:
        stack.say("Paris")
        body = {**stack.chat_body, "messages": [{"role": "user", "content": "France"}], "user": "ann@example.org"}
        headers = {"authorization": "Bearer sk-secret", "tracestate": "a=hidden", "baggage": "b=hidden"}
        bodies = {"/v1/chat/completions": body, "/v1/completions": {"model": "tiny", "prompt": "France"}}
        for path, fields in bodies.items():
            assert (await stack.client.post(path, json=fields, headers=headers)).status_code == 200
        await stack.client.post("/v1/chat/completions?sk-secret", content=b'{"France', headers=headers)
        await eventually(lambda: len(receiver.traces()) == 3)
    told = b"".join(receiver.bodies)
    assert b"tiny" in told
    for secret in (b"France", b"Paris", b"secret", b"example.org", b"hidden"):
        assert secret not in told


# -- when no collector listens ------------------------------------------------------------------------------------
async def test_a_receiver_that_is_away_costs_traces_and_nothing_else(card, tokenizer, receiver, monkeypatch, caplog):
    caplog.set_level("INFO")
    async with tracing(receiver, card, tokenizer) as stack:

        async def counted() -> dict[str, float]:
            text = (await stack.client.get("/metrics")).text
            found = re.findall(r'_telemetry_exports_total\{result="(\w+)",signal="trace"\} (\S+)', text)
            return {how: float(n) for how, n in found}

        receiver.status = 503
        stack.say("Hello")
        for _ in range(3):
            assert (await stack.chat()).status_code == 200

        while await counted() != {"sent": 0.0, "dropped": 3.0}:
            await asyncio.sleep(0.01)
        receiver.status = 200
        assert (await stack.chat()).status_code == 200
        await eventually(lambda: receiver.spans)
        assert await counted() == {"sent": 1.0, "dropped": 3.0}
    lines = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(lines) == 2, lines


async def test_what_waits_is_told_when_the_gateway_ends(card, tokenizer, receiver, monkeypatch):
    monkeypatch.setattr(telemetry_checks, "TRACE_EXPORT_INTERVAL", 3600)
    async with tracing(receiver, card, tokenizer) as stack:
        stack.say("Hello")
        assert ((await stack.chat()).status_code, receiver.spans) == (200, [])
    assert len(receiver.traces()) == 1


async def test_clients_cannot_have_more_traced_than_so_many(card, tokenizer, receiver, monkeypatch):
    monkeypatch.setattr(telemetry_checks, "monotonic", lambda: 100.0)
    async with running(card, tokenizer, traces={"endpoint": receiver.url, "ratio": 0.0, "per_second": 2}) as stack:
        stack.say("Hello")
        headers = {"traceparent": SAMPLED}
        post = stack.client.post
        await asyncio.gather(*(post("/v1/chat/completions", json=stack.chat_body, headers=headers) for _ in range(6)))
        stack.steps(Step(error="out of memory"))
        await stack.chat()
        await eventually(lambda: len(receiver.traces()) == 2)
    roots = [span for span in receiver.spans if span.name.startswith("POST ")]
    assert [(span.trace == TRACE, span.failed) for span in roots] == [(True, False), (True, False), (False, True)]


# -- the setting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "more", "name"),
    [("own", "service.name=other,", "own"), ("", "service.name=other,", "other"), (None, "", "llmops-gateway")],
)
def test_the_service_has_the_name_that_opentelemetry_gives_it(own, more, name, monkeypatch):
    """open-telemetry/opentelemetry-specification, configuration/sdk-environment-variables.md.

    OTEL_SERVICE_NAME precedes OTEL_RESOURCE_ATTRIBUTES, and an empty variable is as if it were unset.
    """
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"{more}host.name=h")
    monkeypatch.delenv("OTEL_SERVICE_NAME", False) if own is None else monkeypatch.setenv("OTEL_SERVICE_NAME", own)
    exporter = OtlpSpanExporter("http://127.0.0.1:4318/v1/traces", 1.0)
    (resource,) = (part.resource for part in exporter.message([]).resource_spans)
    exporter.close()
    found = {one.key: one.value.string_value for one in resource.attributes}
    assert (found["service.name"], found["host.name"]) == (name, "h")


def test_the_setting_without_the_extra_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "llmops.gateway.telemetry.otlp_exporter", None)
    with pytest.raises(MissingDependencyError) as failed:
        create_app(GatewaySettings(traces={"endpoint": "http://127.0.0.1:4318"}))
    said = "The setting `traces` needs OpenTelemetry, which is not installed; install it with: "
    assert failed.value.message == said + install_command("otel")


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("http://otel:4318", "http://otel:4318/v1/traces"),
        ("http://otel:4318/", "http://otel:4318/v1/traces"),
        ("http://otel:4318/?token=a/b", "http://otel:4318/v1/traces?token=a/b"),
        ("https://otel.example/ingest", "https://otel.example/ingest"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_protocols(given, endpoint):
    assert load_settings(traces={"endpoint": given}).traces.endpoint == endpoint


@pytest.mark.parametrize("given", ["otel:4318", "grpc://otel:4317", "http://"])
def test_what_is_no_endpoint_is_refused(given):
    with pytest.raises(InputError, match=r"traces\.endpoint"):
        load_settings(traces={"endpoint": given})
