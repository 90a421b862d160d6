"""A client of Triton's gRPC API, with one stream per request.

The client calls the engine model (token ids) or the ensemble (text). The gateway's overhead is
measured against this client, so the client uses grpc.aio with Triton's protobuf messages directly,
without the more expensive tritonclient.
"""

import struct
import time
from typing import Any

from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmops import contract
from llmops.connection_errors import grpc_call_error
from llmops.contract import EMPTY_FINAL_PARAMETER, ENGINE_SUFFIX, FINAL_RESPONSE_PARAMETER, METADATA_PARAMETER
from llmops.errors import ServerError
from llmops.gateway.triton.request_writer import MessageTensorWriter
from llmops.input_files import parse_json
from llmops.perf.clients.base import RequestOptions
from llmops.perf.records import Record, Request
from llmops.untrusted_text import escape_unsafe

_OUTPUT_IDS = contract.OUTPUT_IDS.name
_PUBLIC = {tensor.name: tensor for tensor in contract.ENSEMBLE_INPUTS}
#: Tokens beyond the requested number after which the client ends a request whose server does not
#: stop.
MAX_EXTRA_TOKENS = 1024
#: Maximum size of a received message in bytes. A step has a few, and the metadata of a model with
#: thousands of adapters has a megabyte.
MAX_MESSAGE_BYTES = 16 * 2**20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
]


class TritonBenchClient:
    """A load generator client of Triton. Create the client inside the event loop that uses it."""

    def __init__(self, address: str, model: str, options: RequestOptions, ensemble: bool = False) -> None:
        """Create a client of a served model.

        Args:
            address: HOST:PORT of Triton's gRPC.
            model: The served NAME.
            options: The options of all requests.
            ensemble: True to call the ensemble NAME with text, False to call NAME-tensorrt_llm with
                token ids.
        """
        self._address, self._model, self._options, self._ensemble = address, model, options, ensemble
        self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._count = 0

    async def read_metadata(self) -> dict[str, Any]:
        """Return the metadata of the engine model (docs/contract.md).

        Raise ServerError if it has none.
        """
        name = f"{self._model}{ENGINE_SUFFIX}"
        try:
            response = await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=name), timeout=10)
        except aio.AioRpcError as error:
            raise ServerError(
                f"Triton at {self._address} does not serve {name} ({error.details()}); name another model."
            ) from error
        text = response.config.parameters[METADATA_PARAMETER].string_value
        try:
            metadata = parse_json(text) if text else {}
        except ValueError:
            metadata = None
        if not isinstance(metadata, dict):
            raise ServerError(
                f"Triton at {self._address} does not describe {name} as `llmops repo` does; "
                "make the model repository with that command."
            )
        return metadata

    async def send(self, request: Request, start: float | None = None) -> Record:
        message = self._message(request)
        record = Record(start=time.perf_counter() if start is None else start, requested=request.max_tokens)
        call = self._stub.ModelStreamInfer(timeout=self._options.timeout)
        try:
            await call.write(message)
            await call.done_writing()
            await self._read(call, request, record)
        except aio.AioRpcError as error:
            record.error = f"grpc_{error.code().name.lower()}"
        finally:
            call.cancel()
        record.end = record.end or time.perf_counter()
        return record

    async def _read(self, call: Any, request: Request, record: Record) -> None:
        ended = False
        async for response in call:
            now = time.perf_counter()
            if response.error_message:
                record.error = f"triton {escape_unsafe(response.error_message.split(':')[0][:60])}"
                break
            inner = response.infer_response
            ended = (
                FINAL_RESPONSE_PARAMETER in inner.parameters and inner.parameters[FINAL_RESPONSE_PARAMETER].bool_param
            )
            count = self._tokens(inner, request, record)
            if count:
                record.tokens_out += count
                if self._options.stream:
                    record.chunks.append(now)
                    record.first = record.first or now
            if request.cancel_after is not None and record.tokens_out >= request.cancel_after:
                record.cancelled = True
                break
            if ended:
                break
            if record.tokens_out > MAX_EXTRA_TOKENS + request.max_tokens:
                record.error = "too many tokens"
                break
        record.end = time.perf_counter()
        if not (ended or record.error or record.cancelled):
            record.error = "truncated"

    def _tokens(self, response: Any, request: Request, record: Record) -> int:
        raw = dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=False))
        if self._ensemble:
            # Text has no token counts, so a message counts as one token. The count is too low only
            # if the server holds back an incomplete character.
            return int(len(raw.get(contract.TEXT_OUTPUT, b"")) > 4)
        ids = raw.get(_OUTPUT_IDS, b"")
        record.counted = False
        if request.keep_text:
            record.ids = (record.ids or []) + list(struct.unpack(f"<{len(ids) // 4}i", ids[: len(ids) // 4 * 4]))
        return len(ids) // 4

    def _message(self, request: Request) -> Any:
        self._count += 1
        name = self._model if self._ensemble else f"{self._model}{ENGINE_SUFFIX}"
        message = service_pb2.ModelInferRequest(model_name=name, id=f"bench-{self._count}")
        message.parameters[EMPTY_FINAL_PARAMETER].bool_param = True
        (self._ensemble_inputs if self._ensemble else self._engine_inputs)(MessageTensorWriter(message), request)
        return message

    def _engine_inputs(self, tensors: MessageTensorWriter, request: Request) -> None:
        ids = request.prompt
        assert isinstance(ids, list)
        tensors.ids(contract.INPUT_IDS, ids)
        tensors.scalar(contract.INPUT_LENGTHS, len(ids))
        tensors.scalar(contract.REQUEST_OUTPUT_LEN, request.max_tokens)
        tensors.scalar(contract.STREAMING, self._options.stream)
        tensors.scalar(contract.RUNTIME_TOP_K, 1)
        if self._options.ignore_eos:
            tensors.scalar(contract.END_ID, -1)

    def _ensemble_inputs(self, tensors: MessageTensorWriter, request: Request) -> None:
        tensors.text(_PUBLIC[contract.TEXT_INPUT], str(request.prompt))
        tensors.scalar(_PUBLIC[contract.MAX_TOKENS], request.max_tokens)
        tensors.scalar(_PUBLIC[contract.STREAM], self._options.stream)
        tensors.scalar(_PUBLIC[contract.TOP_K], 1)
        if self._options.ignore_eos:
            tensors.scalar(_PUBLIC[contract.END_ID.name], -1)

    async def close(self) -> None:
        await self._channel.close()


async def first_model(address: str) -> str:
    """Return the served name of the first ready engine model.

    Raises:
        ServerError: No engine model is ready, or Triton cannot be reached.
    """
    async with aio.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            index = await stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=10)
        except aio.AioRpcError as error:
            raise grpc_call_error(address, error) from error
    names = sorted(m.name.removesuffix(ENGINE_SUFFIX) for m in index.models if m.name.endswith(ENGINE_SUFFIX))
    if not names:
        raise ServerError(
            f"Triton at {address} has no ready model whose name ends in {ENGINE_SUFFIX}; load a repository that "
            "`llmops repo` has made."
        )
    return str(names[0])
