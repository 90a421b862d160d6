"""NAME-tensorrt_llm where the engine runs in Triton's Python backend: TensorRT-LLM's tensors on any runtime."""

from __future__ import annotations

import json
import uuid

import llmops_contract as contract
import triton_python_backend_utils as pb_utils
from llmops_engine.loop import ActiveRequest, EngineLoop
from llmops_engine.metrics import TritonMetrics
from llmops_engine.parent_death import exit_with_parent
from llmops_engine.request import RequestRejectedError
from llmops_engine.runtimes.choose import create_runtime
from llmops_engine.steps.sinks import FINAL, RequestSink, send_error
from llmops_engine.steps.stream_server import StepStreamServer
from llmops_engine.steps.submissions import SubmissionReader
from llmops_engine.tensor_parser import CAPABILITY_INPUTS, EngineCapabilities, Tensors, flag, parse_request


class TritonPythonModel:
    """Decoupled: `execute` only hands requests to the engine thread, which answers through their response senders."""

    def initialize(self, args: dict[str, str]) -> None:
        exit_with_parent()
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._card = json.loads(parameters[contract.METADATA_PARAMETER])
        self._limits = EngineCapabilities(
            target=self._card["target"],
            max_seq_len=self._card["max_seq_len"],
            vocab_size=self._card["vocab_size"],
            end_ids=frozenset(self._card["end_ids"]),
            max_sequences=self._card["capabilities"]["n"],
            adapters=frozenset(adapter["id"] for adapter in self._card["adapters"]),
            lacks=frozenset(name for name in CAPABILITY_INPUTS if not self._card["capabilities"].get(name, True)),
            bad_words=self._card["capabilities"]["bad_words"],
            logit_bias=self._card["capabilities"]["logit_bias"],
            guides=tuple(self._card["capabilities"]["guided"]),
        )
        runtime = create_runtime(parameters, self._card)
        name = args["model_name"]
        metrics = TritonMetrics(name, args["model_version"])
        max_open = self._card["max_batch_size"] + int(parameters[contract.QUEUE_SIZE_PARAMETER])
        self._loop = EngineLoop(
            runtime, metrics.report, lambda text: pb_utils.Logger.log_error(f"{name}: {text}"), max_open
        )
        served = (self._card["name"], args["model_version"], self._card["engine"], uuid.uuid4().hex)
        self._steps = StepStreamServer(self._loop, self._limits, SubmissionReader(config["input"]), served)
        self._loop.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            self._accept(request)

    def is_ready(self) -> bool:
        """Triton asks this for each ModelReady (the Python backend of 26.04 and later)."""
        return not self._loop.failure

    def finalize(self) -> None:
        self._loop.close()

    def _accept(self, request: pb_utils.InferenceRequest) -> None:
        sender = request.get_response_sender()
        try:
            tensors = _tensors(request)
            if self._steps.handle(tensors, sender):
                return
            if flag(tensors, contract.STOP):
                self._stop(request.request_id(), sender)
                return
            parsed = parse_request(tensors, self._limits)
            if parsed.top_log_probs:
                raise RequestRejectedError(f"{contract.TOP_LOG_PROBS}: is answered on step streams only")
            self._loop.submit(ActiveRequest(request.request_id(), parsed, RequestSink(sender, parsed)))
        except RequestRejectedError as refusal:
            send_error(sender, str(refusal))

    def _stop(self, request_id: str, sender: pb_utils.InferenceResponseSender) -> None:
        if not request_id:
            raise RequestRejectedError(f"{contract.STOP}: needs the request id of the request to stop")
        self._loop.stop_requests(request_id, lambda: sender.send(flags=FINAL))


def _tensors(request: pb_utils.InferenceRequest) -> Tensors:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
