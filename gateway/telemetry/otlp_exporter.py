"""The export of finished requests as OpenTelemetry spans, by OTLP over HTTP.

The thread of an ExportQueue sends the spans. Their protobuf messages are built directly from the
recorded times. Spans of OpenTelemetry's SDK, opened during the request and converted by its
exporter, cost ten times as much: 227 µs for the six spans of one request.

Names follow the semantic conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai, read in November 2026). The
conventions are still in development, so no other module uses the names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import getrandbits
from typing import Any
from urllib.parse import unquote

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from llmops import __version__
from llmops.errors import ResourceError
from llmops.gateway.interfaces import FINISH_REASONS
from llmops.gateway.telemetry.request_timeline import FinishedRequest, RequestTimeline, TimelineStage, build_timeline
from llmops.gateway.telemetry.trace_context import TraceContext
from llmops.response_limits import UNCOMPRESSED, bound_response
from llmops.urls import failure_reason, without_secrets

#: OpenTelemetry's `gen_ai.operation.name` by route. Every route that is not listed counts as
#: `chat`.
GEN_AI_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}
SpanAttributes = dict[str, Any]


class OtlpSpanExporter:
    """An exporter that sends finished requests to an OTLP receiver."""

    def __init__(self, endpoint: str, timeout: float) -> None:
        """Create an exporter.

        The standard environment variables of OpenTelemetry set the resource, headers and
        certificate.

        Args:
            endpoint: URL of the receiver.
            timeout: Maximum duration of a request to the receiver, in seconds.
        """
        headers = {"content-type": "application/x-protobuf", **_parse_pairs("OTEL_EXPORTER_OTLP_HEADERS")}
        own = {"service.name": "llmops-gateway", "service.version": __version__}
        own |= _parse_pairs("OTEL_RESOURCE_ATTRIBUTES")
        own["service.name"] = os.environ.get("OTEL_SERVICE_NAME") or own["service.name"]
        self._resource = _to_key_values(own)
        self._endpoint = endpoint
        trusted: Any = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE", True)
        self._client = httpx.Client(
            headers={**headers, **UNCOMPRESSED},
            timeout=timeout,
            verify=trusted,
            event_hooks={"response": [bound_response]},
        )

    def send(self, batch: Sequence[FinishedRequest]) -> None:
        """Send a batch. Raises ResourceError if the receiver does not accept it."""
        try:
            answer = self._client.post(self._endpoint, content=self.message(batch).SerializeToString())
        except httpx.HTTPError as error:
            raise ResourceError(f"{without_secrets(self._endpoint)}: {failure_reason(error)}") from error
        if not answer.is_success:
            raise ResourceError(f"{without_secrets(self._endpoint)} answers {answer.status_code}")

    def message(self, batch: Sequence[FinishedRequest]) -> ExportTraceServiceRequest:
        message = ExportTraceServiceRequest()
        part = message.resource_spans.add()
        part.resource.attributes.extend(self._resource)
        scope = part.scope_spans.add()
        scope.scope.name, scope.scope.version = "llmops.gateway", __version__
        for one in batch:
            _SpanBuilder(one, scope).add()
        return message

    def close(self) -> None:
        self._client.close()


class _SpanBuilder:
    """A builder of the spans of one traced request.

    The spans are one for the request, one for each of its stages, and one or more for the work of
    the engine.
    """

    def __init__(self, one: FinishedRequest, scope: ScopeSpans) -> None:
        assert one.trace is not None
        self._one, self._scope, self._trace = one, scope, one.trace
        self._trace_id = bytes.fromhex(one.trace.trace_id)
        # offset from perf_counter to Unix time
        self._zero = one.at - one.ended

    def add(self) -> None:
        one, line = self._one, build_timeline(self._one)
        whole = TimelineStage(f"POST {one.route}", one.started, max(one.ended, one.started))
        attributes = _request_attributes(one, self._trace)
        own = self._span(whole, bytes.fromhex(self._trace.parent_id), attributes, Span.SPAN_KIND_SERVER)
        for stage in line.stages:
            self._span(stage, own)
        if line.call is not None:
            self._call(line, line.call, own)

    def _call(self, line: RequestTimeline, stage: TimelineStage, parent: bytes) -> None:
        one, operation = self._one, GEN_AI_OPERATIONS.get(self._one.route, "chat")
        stage = stage._replace(name=f"{operation} {one.model}")
        own = bytes.fromhex(self._trace.call_id)
        self._span(stage, parent, _inference_attributes(one, operation, line.inside), Span.SPAN_KIND_CLIENT, own)
        for part in line.inside:
            self._span(part, own)
        for move in one.moves:
            how = {"llmops.reason": move.reason, "llmops.replica.from": move.left, "llmops.replica.to": move.to}
            self._span(TimelineStage("continue", move.began, move.ended), own, how)

    def _span(
        self,
        stage: TimelineStage,
        parent: bytes,
        attributes: SpanAttributes | None = None,
        kind: Span.SpanKind.ValueType = Span.SPAN_KIND_INTERNAL,
        own: bytes = b"",
    ) -> bytes:
        own = own or (getrandbits(64) or 1).to_bytes(8, "big")
        span = self._scope.spans.add(
            trace_id=self._trace_id,
            span_id=own,
            parent_span_id=parent,
            name=stage.name,
            kind=kind,
            start_time_unix_nano=int((self._zero + stage.begin) * 1e9),
            end_time_unix_nano=int((self._zero + stage.end) * 1e9),
            attributes=_to_key_values(attributes or {}),
        )
        if self._one.failed and kind != Span.SPAN_KIND_INTERNAL:
            span.status.code = Status.STATUS_CODE_ERROR
        return own


def _request_attributes(one: FinishedRequest, trace: TraceContext) -> SpanAttributes:
    found: dict[str, Any] = {"http.request.method": "POST", "http.route": one.route}
    found |= {"url.scheme": trace.scheme, "url.path": trace.path}
    found["llmops.request_id"] = one.request_id
    if one.outcome.status:
        found["http.response.status_code"] = one.outcome.status
    if one.caller.tenant_id:
        found["llmops.tenant"] = one.caller.tenant_id
    if one.meter is not None and one.meter.outcome is not None:
        found["llmops.outcome"] = one.meter.outcome
    return found | _error_attributes(one)


def _inference_attributes(one: FinishedRequest, operation: str, parts: Sequence[TimelineStage]) -> SpanAttributes:
    found: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "nvidia.triton"}
    found |= {"gen_ai.request.model": one.model, "gen_ai.response.model": one.model}
    usage, meter = one.outcome.usage, one.meter
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if usage.cached_tokens is not None:
            found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        if usage.reasoning_tokens:
            found["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    if one.outcome.finish in FINISH_REASONS:
        found["gen_ai.response.finish_reasons"] = [one.outcome.finish]
    if meter is not None:
        # responses of the engine are always streamed, even if the client did not ask for a stream
        found["gen_ai.request.stream"] = True
    if meter is not None and meter.first:
        found["gen_ai.response.time_to_first_chunk"] = parts[0].end - parts[0].begin
    if one.replica:
        found["llmops.replica"] = one.replica
    if one.continued:
        found["llmops.continued"] = one.continued
    return found | _error_attributes(one)


def _error_attributes(one: FinishedRequest) -> SpanAttributes:
    if not one.failed:
        return {}
    status, finish, _ = one.outcome
    return {"error.type": str(status) if status >= 500 else finish}


def _to_key_values(given: SpanAttributes) -> list[KeyValue]:
    return [KeyValue(key=key, value=_to_any_value(value)) for key, value in given.items()]


def _to_any_value(value: Any) -> AnyValue:
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=map(_to_any_value, value)))
    if isinstance(value, str):
        # protobuf rejects text that is not valid Unicode
        return AnyValue(string_value=value.encode("utf-8", "replace").decode())
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)


def _parse_pairs(variable: str) -> dict[str, str]:
    """Parse an environment variable of OpenTelemetry with pairs such as `a=b,c=d`."""
    pairs = (pair.partition("=") for pair in os.environ.get(variable, "").split(","))
    return {name.strip(): unquote(value.strip()) for name, found, value in pairs if found}
