"""The gRPC client of one Triton server: models, metadata, health, unary calls and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from llmops.contract import ENGINE_SUFFIX, METADATA_PARAMETER
from llmops.gateway.errors import TRITON_NOT_RESPONDING, TRITON_UNREACHABLE, UnavailableError
from llmops.gateway.triton.response_reader import error_from_message

#: Maximum size of a message from Triton in bytes, which bounds the memory. The largest messages are
#: batches of vectors and log-probabilities of prompts.
MAX_MESSAGE_BYTES = 32 * 2**20

#: Milliseconds of silence after which the connection is checked with a ping. `llmops serve` makes
#: Triton accept pings this often (MIN_PING_INTERVAL in model_repository/server/command.py).
KEEPALIVE_MS = 20_000
# The short backoff finds a restarted Triton within two seconds. The size of sent messages is not
# limited, because requests hold whole prompts.
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


#: Exceptions of a write to a call that has ended. Which one is raised depends on the side that
#: notices the end first.
WRITE_ERRORS = (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError)

GrpcMetadata = tuple[tuple[str, str], ...]


class TritonClient:
    """A client of one Triton server. Must be created inside a running event loop."""

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        """Connect to a Triton server.

        Args:
            address: HOST:PORT of the gRPC endpoint.
            timeout: Maximum duration of a unary call in seconds. Inference has no time limit.
        """
        self.address = address
        self._timeout = timeout
        self._channel = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        #: Starts a bidirectional ModelStreamInfer call.
        self.start_call: Callable[..., Any] = self._stub.ModelStreamInfer

    async def server_ready(self) -> bool:
        """Return True if Triton answers that it is ready."""
        try:
            answer = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=self._timeout)
        except aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def model_ready(self, model: str) -> bool:
        """Return True if Triton answers that the model is ready."""
        try:
            answer = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=self._timeout)
        except aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def engine_models(self) -> dict[str, bool]:
        """Return the engine models by name, with True for those that are ready.

        The repository index shows whether a model is loaded. Each loaded model is asked as well,
        because only the model knows whether its engine has ended.

        Raises:
            UnavailableError: Triton cannot be reached or does not answer.
        """
        models = {name: loaded for name, loaded in (await self.index()).items() if name.endswith(ENGINE_SUFFIX)}
        return {name: loaded and await self.model_ready(name) for name, loaded in models.items()}

    async def index(self) -> dict[str, bool]:
        """Return all models by name, with True for those that are loaded.

        Raises:
            UnavailableError: Triton cannot be reached or does not answer.
        """
        answer = await self._call(self._stub.RepositoryIndex, service_pb2.RepositoryIndexRequest())
        models: dict[str, bool] = {}
        for model in answer.models:
            # the index has an entry per version; an old version that is not loaded does not matter
            models[model.name] = models.get(model.name, False) or model.state == "READY"
        return dict(sorted(models.items()))

    async def infer(
        self, request: service_pb2.ModelInferRequest, metadata: GrpcMetadata | None = None
    ) -> service_pb2.ModelInferResponse:
        """Send a request and return its response.

        Raises:
            UnavailableError: Triton cannot be reached or does not have the model.
            ApiError: The model rejects the request or fails on it.
        """
        try:
            return await self._stub.ModelInfer(request, metadata=metadata)
        except aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND):
                raise UnavailableError(TRITON_UNREACHABLE, detail=self._describe(error)) from error
            raise error_from_message(error.details() or error.code().name) from error

    async def metadata_text(self, model: str) -> str:
        """Return the model's parameter `llmops_model_metadata`, empty if it is not set.

        Raises:
            UnavailableError: Triton cannot be reached or does not answer.
        """
        config = await self.model_config(model)
        return (
            str(config.parameters[METADATA_PARAMETER].string_value) if METADATA_PARAMETER in config.parameters else ""
        )

    async def model_config(self, model: str) -> model_config_pb2.ModelConfig:
        """Return the model's configuration as Triton completed it.

        Raises:
            UnavailableError: Triton cannot be reached or does not answer.
        """
        answer = await self._call(self._stub.ModelConfig, service_pb2.ModelConfigRequest(name=model))
        return answer.config

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout)
        except aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise UnavailableError(TRITON_UNREACHABLE, detail=self._describe(error)) from error
            raise UnavailableError(TRITON_NOT_RESPONDING, detail=self._describe(error)) from error

    def _describe(self, error: aio.AioRpcError) -> str:
        return f"{self.address}: {error.details() or error.code().name}"
