"""One Triton server over gRPC: its models, their cards, their health, and the calls that streams are made of."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import aio
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from llmops.contract import ENGINE_SUFFIX, METADATA_PARAMETER
from llmops.gateway.errors import TRITON_NOT_RESPONDING, TRITON_UNREACHABLE, UnavailableError
from llmops.gateway.triton.response_reader import error_from_message

# A restarted Triton must be seen within a second or two; messages hold whole prompts and answers
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


#: Exceptions of a write to a call that has ended, depending on which side noticed first.
WRITE_ERRORS = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError)

GrpcMetadata = tuple[tuple[str, str], ...]


class TritonClient:
    """`address` is HOST:PORT of Triton's gRPC endpoint. Must be made inside a running event loop."""

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self.address = address
        self._timeout = timeout
        self._channel = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def start_call(self, metadata: GrpcMetadata | None = None) -> Any:
        """Start one bidirectional ModelStreamInfer call."""
        return self._stub.ModelStreamInfer(metadata=metadata)

    async def server_ready(self) -> bool:
        """False also when Triton cannot be reached."""
        try:
            answer = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=self._timeout)
        except aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def model_ready(self, model: str) -> bool:
        """False also when there is no such model or no Triton."""
        try:
            answer = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=self._timeout)
        except aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def engine_models(self) -> dict[str, bool]:
        """The repository's engine models, and whether each is ready. Raises UnavailableError.

        The index says whether a model is loaded; only the model itself says whether its engine has ended.
        """
        models = {name: loaded for name, loaded in (await self.index()).items() if name.endswith(ENGINE_SUFFIX)}
        return {name: loaded and await self.model_ready(name) for name, loaded in models.items()}

    async def index(self) -> dict[str, bool]:
        """The repository's models by name, and whether each is loaded. Raises UnavailableError."""
        answer = await self._ask(self._stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())
        models: dict[str, bool] = {}
        for model in answer.models:
            # one entry per version; an old version that was unloaded does not matter
            models[model.name] = models.get(model.name, False) or model.state == "READY"
        return dict(sorted(models.items()))

    async def infer(
        self, request: service_pb2.ModelInferRequest, metadata: GrpcMetadata | None = None
    ) -> service_pb2.ModelInferResponse:
        """One request, one response. Raises what `error_from_message` makes of the model's error, or UnavailableError."""
        try:
            return await self._stub.ModelInfer(request, metadata=metadata)
        except aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
                raise UnavailableError(TRITON_UNREACHABLE, detail=self._said(error)) from error
            raise error_from_message(error.details() or error.code().name) from error

    async def metadata_text(self, model: str) -> str:
        """The model's `llmops_model_metadata` parameter, empty when it has none. Raises UnavailableError."""
        config = await self.model_config(model)
        return (
            str(config.parameters[METADATA_PARAMETER].string_value) if METADATA_PARAMETER in config.parameters else ""
        )

    async def model_config(self, model: str) -> model_config_pb2.ModelConfig:
        """Its configuration as Triton holds it. Raises UnavailableError."""
        answer = await self._ask(self._stub.ModelConfig, service_pb2.ModelConfigRequest(name=model))
        return answer.config

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout)
        except aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise UnavailableError(TRITON_UNREACHABLE, detail=self._said(error)) from error
            raise UnavailableError(TRITON_NOT_RESPONDING, detail=self._said(error)) from error

    def _said(self, error: aio.AioRpcError) -> str:
        return f"{self.address}: {error.details() or error.code().name}"
