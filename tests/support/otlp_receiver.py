"""A receiver of traces, as OTLP over HTTP has it: keeps every span that it is sent."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf import json_format

from tests.support.pages import Page, PageServer, Request


@dataclass(frozen=True)
class Told:
    """One span. Ids are hexadecimal; times in nanoseconds."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start: int
    end: int
    failed: bool
    attributes: dict


class Receiver:
    def __init__(self) -> None:
        self.spans: list[Told] = []
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()
        self.status = 200
        self.url = ""

    def traces(self) -> dict[str, list[Told]]:
        found: dict[str, list[Told]] = {}
        for span in list(self.spans):
            found.setdefault(span.trace, []).append(span)
        return found

    def take(self, path: str, kind: str, body: bytes) -> int:
        if self.status == 200:
            self.paths.add(path)
            self.bodies.append(body)
            self.spans.extend(_spans(kind, body))
        return self.status


def _spans(kind: str, body: bytes) -> Iterator[Told]:
    # only tests of traces need it: this file is read by all of the gateway's
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    if "json" in kind:
        message = json_format.ParseDict(
            _plain_json(json.loads(body)), ExportTraceServiceRequest(), ignore_unknown_fields=True
        )
    else:
        message = ExportTraceServiceRequest.FromString(body)
    for resource in message.resource_spans:
        service = next(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
        for scope in resource.scope_spans:
            for span in scope.spans:
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                attributes = {one.key: _plain(one.value) for one in span.attributes}
                yield Told(service, *ids, span.name, span.kind, *times, span.status.code == 2, attributes)


def _plain_json(value):
    """OTLP's JSON, as Triton sends it, to protobuf's: ids are hexadecimal there, and base64 here."""
    if isinstance(value, list):
        return [_plain_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode() if key in ids else _plain_json(one)
        for key, one in value.items()
    }


def _plain(value):
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def covered(root: Told, spans: list[Told]) -> float:
    """The share of the root's time that other spans of its trace fill."""
    total, at = 0, root.start
    for span in sorted((span for span in spans if span is not root), key=lambda one: one.start):
        total += max(0, min(span.end, root.end) - max(span.start, at))
        at = max(at, span.end)
    return total / (root.end - root.start)


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    def answer(request: Request) -> Page:
        return Page(status=receiver.take(request.path, request.headers["content-type"], request.body))

    with PageServer(answer) as server:
        receiver.url = server.url
        yield receiver
