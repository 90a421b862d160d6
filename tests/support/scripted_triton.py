"""A gRPC server that speaks Triton's protocol from a script, for faults that no real Triton can be told to have.

`ScriptedTriton.answer` decides, per request, what comes back; it sees the request's tensors and yields steps.
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Self

from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass
class Step:
    """One response: new tokens of a sequence, or an error; `wait` seconds before it."""

    tokens: tuple[int, ...] = ()
    sequence: int = 0
    logprobs: tuple[float, ...] | None = None
    error: str = ""
    final: bool = False
    wait: float = 0.0
    hang: bool = False
    drop: bool = False


Script = Callable[[dict], "list[Step] | AsyncIterator[Step]"]


def tensors_of(request: service_pb2.ModelInferRequest) -> dict:
    """Inputs as Python lists or strings, by name."""
    formats = {"INT32": "i", "FP32": "f", "UINT64": "Q", "BOOL": "?", "INT64": "q"}
    found: dict = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            found[tensor.name] = raw[4:].decode()
        else:
            kind = formats[tensor.datatype]
            found[tensor.name] = list(struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw))
    return found


class Listening(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A real gRPC server on a free port, which it has again when it is started again."""

    port = 0
    _server: aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        if self._server is None:
            await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


@dataclass
class ScriptedTriton(Listening):
    """`card` is what the engine model announces; `active` counts the streams that are open now."""

    card: dict
    script: Script
    port: int = 0
    requests: list[dict] = field(default_factory=list)
    active: int = 0
    ready: bool = True
    engine_ready: bool = True
    state: str = "READY"

    async def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=self.ready)

    async def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=self.ready and self.engine_ready)

    async def RepositoryIndex(self, request, context):
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name=self.card["name"], version="1", state="READY")
        answer.models.add(name=self.card["name"] + "-tensorrt_llm", version="1", state=self.state)
        return answer

    async def ModelConfig(self, request, context):
        answer = service_pb2.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.parameters["llmops_model_metadata"].string_value = json.dumps(self.card)
        return answer

    async def ModelStreamInfer(self, requests, context):
        self.active += 1
        try:
            async for request in requests:
                tensors = tensors_of(request)
                told = {"id": request.id, "model": request.model_name, "metadata": context.invocation_metadata()}
                self.requests.append({**told, **tensors})
                async for step in _steps(self.script(tensors)):
                    if step.wait:
                        await asyncio.sleep(step.wait)
                    if step.hang:
                        await asyncio.sleep(3600)
                    if step.drop:
                        await context.abort(14, "connection lost")
                    yield _response(request, step)
        finally:
            self.active -= 1


async def _steps(script) -> AsyncIterator[Step]:
    if isinstance(script, list):
        for step in script:
            yield step
    else:
        async for step in script:
            yield step


def _response(request: service_pb2.ModelInferRequest, step: Step) -> service_pb2.ModelStreamInferResponse:
    answer = service_pb2.ModelStreamInferResponse(error_message=step.error)
    inner = answer.infer_response
    inner.model_name, inner.id = request.model_name, request.id
    inner.parameters["triton_final_response"].bool_param = step.final
    if step.tokens:
        _add(inner, "output_ids", "INT32", [1, 1, len(step.tokens)], struct.pack(f"<{len(step.tokens)}i", *step.tokens))
        _add(inner, "sequence_length", "INT32", [1, 1], struct.pack("<i", len(step.tokens)))
        _add(inner, "sequence_index", "INT32", [1, 1], struct.pack("<i", step.sequence))
        if step.logprobs is not None:
            packed = struct.pack(f"<{len(step.logprobs)}f", *step.logprobs)
            _add(inner, "output_log_probs", "FP32", [1, 1, len(step.logprobs)], packed)
    return answer


def _add(inner, name: str, datatype: str, shape: list[int], raw: bytes) -> None:
    inner.outputs.add(name=name, datatype=datatype, shape=shape)
    inner.raw_output_contents.append(raw)
