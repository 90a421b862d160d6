"""The transport with one gRPC stream per request, which every engine model supports."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from llmops.contract import FINAL_RESPONSE_PARAMETER, REQUEST_TRANSPORT
from llmops.gateway.errors import TRITON_UNREACHABLE, ApiError, CancelledStreamError, ProtocolError, UnavailableError
from llmops.gateway.interfaces import Engine, EngineRequest, ModelMetadata, TokenBatch, TokenStream
from llmops.gateway.telemetry.trace_context import TRACEPARENT
from llmops.gateway.triton.grpc_client import WRITE_ERRORS
from llmops.gateway.triton.request_writer import RequestWriter
from llmops.gateway.triton.response_reader import ResponseReader, error_from_message


class RequestStreamTransport(Engine):
    """An engine behind one ModelStreamInfer call per request.

    Cancelling the call cancels the request.
    """

    name = REQUEST_TRANSPORT

    def __init__(self, start_call: Callable[..., Any], engine_model: str, card: ModelMetadata) -> None:
        """Create a transport.

        Args:
            start_call: Starts a ModelStreamInfer call (the stub's method). It accepts call
                metadata.
            engine_model: Name of the engine model in Triton.
            card: Metadata of the model.
        """
        self._start_call = start_call
        self._writer = RequestWriter.of(engine_model, card)

    async def open(self, request: EngineRequest) -> TokenStream:
        message = self._writer.write(request)
        call = self._start_call(metadata=((TRACEPARENT, request.trace),)) if request.trace else self._start_call()
        try:
            await call.write(message)
            await call.done_writing()
        except WRITE_ERRORS as error:
            raise await _write_failure(call, error) from error
        reader = ResponseReader(logprobs=request.logprobs, sequences=request.n, vocab_size=self._writer.vocab_size)
        return RequestStream(call, reader, request.guide is not None)


class RequestStream(TokenStream):
    """The token stream of one call. `cancel` ends the call at once and wakes a waiting reader."""

    def __init__(self, call: Any, reader: ResponseReader, guided: bool = False) -> None:
        self._call = call
        self._reader = reader
        self._guided = guided
        self._final = False
        self._done = False
        self._cancelled = False

    async def __anext__(self) -> TokenBatch:
        if self._cancelled:
            raise CancelledStreamError()
        while not self._done:
            response = await self._read()
            if response is aio.EOF:
                break
            if self._final:
                # do not wait for the end of the call: a faulty server might send messages forever
                self.cancel()
                break
            if response.error_message:
                self.cancel()
                raise error_from_message(response.error_message, self._guided)
            inner = response.infer_response
            if FINAL_RESPONSE_PARAMETER in inner.parameters and inner.parameters[FINAL_RESPONSE_PARAMETER].bool_param:
                self._final = True
            try:
                batch = self._reader.read(inner)
            except (IndexError, KeyError, ValueError, struct.error) as error:
                self.cancel()
                raise ProtocolError(
                    f"The engine sent a message that cannot be read ({error!r}); see Triton's log."
                ) from error
            if batch is not None:
                return batch
        raise StopAsyncIteration

    async def _read(self) -> Any:
        """Return the next message, or aio.EOF at the end of the call.

        After the final response, read on until the server ends the call: dropping the call would
        cancel it, which costs Triton work. An error after the final response counts as the end of
        the call.
        """
        try:
            response = await self._call.read()
        except aio.AioRpcError as error:
            self._done = True
            if self._final:
                return aio.EOF
            raise (CancelledStreamError() if self._cancelled else _error_from_status(error)) from error
        except asyncio.CancelledError:
            # grpc.aio raises CancelledError both when the call is cancelled and when the reading
            # task is
            if self._cancelled and self._final:
                return aio.EOF
            if self._cancelled:
                raise CancelledStreamError() from None
            raise
        if response is aio.EOF:
            self._done = True
            if not self._final:
                raise ProtocolError("The engine ended the stream without its final response; see Triton's log.")
        return response

    def cancel(self) -> None:
        if not self._done:
            self._done = self._cancelled = True
            self._call.cancel()


async def _write_failure(call: Any, error: Exception) -> ApiError:
    """Return the error of a failed write. The reason is in the call's status, not in `error`."""
    if isinstance(error, aio.AioRpcError):
        return _error_from_status(error)
    return UnavailableError(TRITON_UNREACHABLE, detail=str(await call.details() or error))


def _error_from_status(error: aio.AioRpcError) -> ApiError:
    detail = error.details() or error.code().name
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        return UnavailableError(TRITON_UNREACHABLE, detail=detail)
    if error.code() == grpc.StatusCode.CANCELLED:
        return UnavailableError("Triton cancelled the request. Try again later.")
    return error_from_message(detail)
