"""A client that can send any input that an engine model declares, and keeps every response."""

import asyncio
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from grpc import aio
from tritonclient.grpc import model_config_pb2, service_pb2

from llmops import contract
from llmops.contract import BYTES, EMPTY_FINAL_PARAMETER, ENGINE_SUFFIX, FINAL_RESPONSE_PARAMETER
from llmops.gateway.triton.engine_observer import decode_strings
from llmops.gateway.triton.grpc_client import TritonClient
from llmops.gateway.triton.request_writer import MessageTensorWriter
from llmops.gateway.triton.response_reader import trailing_floats
from llmops.perf.verify.findings import WrongError

#: Seconds without a response after which a request counts as stuck. The requests of checks are
#: short, so a working engine answers much sooner.
PATIENCE = 60.0
#: Maximum number of responses to one request, after which an engine counts as one that never stops.
#: The longest checks fill the context in up to 8 sequences.
MAX_RESPONSES = 100_000
#: Maximum number of tokens of all responses to one request, after which an engine counts as one
#: that never stops.
MAX_TOKENS = 2**20
_ARRAYS = {"INT32": "i", "FP32": "f", "INT64": "q", "UINT64": "Q", "BOOL": "b"}
_WORDS = (contract.STOP_WORDS_LIST, contract.BAD_WORDS_LIST)
_INPUTS = {tensor.name: tensor for tensor in contract.PYTHON_ENGINE_INPUTS}


@dataclass
class ProbeResponse:
    """The responses to one request.

    Attributes:
        tokens: The tokens of each sequence.
        log_probs: The log-probability of each token, by sequence.
        cum_log_probs: The last cumulative log-probability of each sequence.
        sizes: The number of tokens of each response, in order.
        lengths: The `sequence_length` of each response, in order.
        others: The values of other output tensors, by name.
        finals: Number of final flags.
        after_final: Number of responses after the final flag.
        error: The engine's error, or None.
        cancelled: True if the request was cancelled by the probe.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    log_probs: dict[int, list[float]] = field(default_factory=dict)
    cum_log_probs: dict[int, float] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    lengths: list[int | None] = field(default_factory=list)
    others: dict[str, list[Any]] = field(default_factory=dict)
    finals: int = 0
    after_final: int = 0
    error: str | None = None
    cancelled: bool = False

    @property
    def ids(self) -> list[int]:
        """Return the tokens of the first sequence. Raise WrongError if the engine sent an error."""
        if self.error is not None:
            raise WrongError(f"the engine failed: {self.error}")
        return self.tokens.get(0, [])

    @property
    def scores(self) -> list[float]:
        return self.log_probs.get(0, [])


OnResponse = Callable[[ProbeResponse], bool]


class Probe:
    """A connection to an engine model.

    Attributes:
        model: The model's name in Triton.
        inputs: The datatype of each input tensor, by name.
        outputs: The datatype of each output tensor, by name.
    """

    def __init__(self, client: TritonClient, model: str, config: Any) -> None:
        self.client, self.model, self.config = client, model, config
        self.inputs = {tensor.name: _datatype(tensor.data_type) for tensor in config.input}
        self.outputs = {tensor.name: _datatype(tensor.data_type) for tensor in config.output}
        self._count = itertools.count()

    @classmethod
    async def open(cls, client: TritonClient, name: str) -> Self:
        """Connect to the engine model of the served `name`.

        Raise UnavailableError if that fails.
        """
        model = name + ENGINE_SUFFIX
        return cls(client, model, await client.model_config(model))

    async def ask(
        self,
        ids: Sequence[int],
        new: int,
        on_response: OnResponse | None = None,
        request_id: str = "",
        greedy: bool = True,
        **tensors: Any,
    ) -> ProbeResponse:
        """Send a streamed request that ignores the end of text, and return its responses.

        Args:
            ids: Token ids of the prompt.
            new: Maximum number of tokens to generate.
            on_response: A function that is called after each response. The function returns True to
                cancel the request.
            request_id: Triton's id of the request.
            greedy: True to always choose the most likely token.
            tensors: Additional or other tensors by name; None omits a tensor.

        Raises:
            WrongError: The engine sends no response for PATIENCE seconds, or never stops.
        """
        given = {
            contract.INPUT_IDS.name: list(ids),
            contract.INPUT_LENGTHS.name: len(ids),
            contract.REQUEST_OUTPUT_LEN.name: new,
            contract.STREAMING.name: True,
            contract.END_ID.name: -1,
            **({contract.RUNTIME_TOP_K.name: 1} if greedy else {}),
            **tensors,
        }
        message = self.message({name: value for name, value in given.items() if value is not None}, request_id)
        result = ProbeResponse()
        try:
            await self._send(message, result, on_response)
        except aio.AioRpcError as error:
            result.error = error.details() or error.code().name
        return result

    async def stop(self, request_id: str) -> None:
        """Send a `stop` request, which ends the running request with the same id."""
        tensors = {
            contract.INPUT_IDS.name: [0],
            contract.INPUT_LENGTHS.name: 1,
            contract.REQUEST_OUTPUT_LEN.name: 1,
            contract.STOP.name: True,
        }
        await self._send(self.message(tensors, request_id), ProbeResponse())

    def message(self, tensors: dict[str, Any], request_id: str = "") -> service_pb2.ModelInferRequest:
        message = service_pb2.ModelInferRequest(
            model_name=self.model, id=request_id or f"verify-{id(self)}-{next(self._count)}"
        )
        message.parameters[EMPTY_FINAL_PARAMETER].bool_param = True
        writer = MessageTensorWriter(message)
        for name, value in tensors.items():
            self._write(writer, name, value)
        return message

    def _write(self, writer: MessageTensorWriter, name: str, value: Any) -> None:
        if name not in self.inputs:
            raise WrongError(f"the model has no input {name}")
        tensor = _INPUTS[name]
        if tensor in _WORDS:
            writer.words(tensor, value)
        elif tensor.datatype == BYTES:
            writer.text(tensor, value)
        elif tensor is contract.INPUT_IDS:
            writer.ids(tensor, value)
        elif isinstance(value, list):
            writer.floats(tensor, value)
        else:
            writer.scalar(tensor, value)

    async def _send(self, message: Any, result: ProbeResponse, on_response: OnResponse | None = None) -> None:
        call = self.client.start_call()
        try:
            await call.write(message)
            await call.done_writing()
            await self._read(call, result, on_response)
        finally:
            call.cancel()

    async def _read(self, call: Any, result: ProbeResponse, on_response: OnResponse | None) -> None:
        for _ in range(MAX_RESPONSES):
            try:
                response = await asyncio.wait_for(call.read(), PATIENCE)
            except TimeoutError:
                raise WrongError(f"the engine sent nothing for {PATIENCE:.0f} s, and the request did not end") from None
            if response is aio.EOF:
                return
            if response.error_message:
                result.error = response.error_message
                return
            self._take(response.infer_response, result)
            if on_response is not None and on_response(result):
                result.cancelled = True
                return
            if sum(map(len, result.tokens.values())) > MAX_TOKENS:
                break
        raise WrongError("the engine sends more tokens than any request asks for, and the request did not end")

    def _take(self, response: Any, result: ProbeResponse) -> None:
        pairs = zip(response.outputs, response.raw_output_contents, strict=False)
        raws = {output.name: (output.datatype, raw) for output, raw in pairs}
        scores = raws.pop(contract.OUTPUT_LOG_PROBS.name, None)
        values = {name: _values(*raw) for name, raw in raws.items()}
        result.after_final += bool(result.finals)
        result.finals += (
            FINAL_RESPONSE_PARAMETER in response.parameters and response.parameters[FINAL_RESPONSE_PARAMETER].bool_param
        )
        ids = values.pop(contract.OUTPUT_IDS.name, None)
        if ids is None:
            return
        sequence = int(values.pop(contract.SEQUENCE_INDEX.name, [0])[0])
        length = values.pop(contract.SEQUENCE_LENGTH.name, [None])[0]
        ids = ids if length is None else ids[:length]
        result.sizes.append(len(ids))
        result.lengths.append(length)
        result.tokens.setdefault(sequence, []).extend(ids)
        if scores is not None:
            count = min(len(ids), len(scores[1]) // 4)
            result.log_probs.setdefault(sequence, []).extend(trailing_floats(scores[1], count))
        if values.get(contract.CUM_LOG_PROBS.name):
            result.cum_log_probs[sequence] = values.pop(contract.CUM_LOG_PROBS.name)[0]
        result.others.update(values)


def _datatype(number: int) -> str:
    """Return the name of a datatype in requests, such as INT32 for TYPE_INT32."""
    name = str(model_config_pb2.DataType.Name(number)).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return list(decode_strings(raw))
    kind = _ARRAYS.get(datatype)
    return array(kind, raw).tolist() if kind else []
