"""The Triton model NAME-tensorrt_llm in the Python backend, with TensorRT-LLM's tensors."""

from __future__ import annotations

import json
import uuid

import llmops_contract as contract
import triton_python_backend_utils as pb_utils
from llmops_engine.loop import ActiveRequest, EngineLoop
from llmops_engine.metrics import TritonMetrics
from llmops_engine.request import RequestRejectedError
from llmops_engine.runtimes.choose import create_runtime
from llmops_engine.steps.sinks import FINAL, RequestSink, send_error
from llmops_engine.steps.stream_server import StepStreamServer
from llmops_engine.steps.submissions import SubmissionReader
from llmops_engine.tensor_parser import CAPABILITY_INPUTS, EngineCapabilities, flag, parse_request
from llmops_process import kill_after_parent


class TritonPythonModel:
    """A decoupled Triton model. `execute` passes requests to the engine thread, which responds."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the runtime and the engine thread."""
        kill_after_parent()
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        metadata = json.loads(parameters[contract.METADATA_PARAMETER])
        features = metadata["capabilities"]
        self._capabilities = EngineCapabilities(
            target=metadata["target"],
            max_seq_len=metadata["max_seq_len"],
            vocab_size=metadata["vocab_size"],
            end_ids=frozenset(metadata["end_ids"]),
            max_sequences=features["n"],
            adapters=frozenset(adapter["id"] for adapter in metadata["adapters"]),
            unsupported=frozenset(name for name in CAPABILITY_INPUTS if not features.get(name, True)),
            bad_words=features["bad_words"],
            logit_bias=features["logit_bias"],
            guides=tuple(features["guided"]),
        )
        runtime = create_runtime(parameters, metadata)
        name, version = args["model_name"], args["model_version"]
        self._loop = EngineLoop(
            runtime,
            report=TritonMetrics(name, version).report,
            log_error=lambda text: pb_utils.Logger.log_error(f"{name}: {text}"),
            max_open=metadata["max_batch_size"] + int(parameters[contract.QUEUE_SIZE_PARAMETER]),
        )
        self._streams = StepStreamServer(
            self._loop,
            capabilities=self._capabilities,
            submissions=SubmissionReader(config["input"]),
            identity=(metadata["name"], version, metadata["engine"], uuid.uuid4().hex),
        )
        self._loop.start()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Pass requests to the engine thread."""
        for request in requests:
            self._accept(request)

    def is_ready(self) -> bool:
        """Return True until the engine has ended.

        Triton calls this for each ModelReady (Python backend of 26.04 and later).
        """
        return not self._loop.failure

    def finalize(self) -> None:
        """End the engine thread and the runtime."""
        self._loop.close()

    def _accept(self, request: pb_utils.InferenceRequest) -> None:
        sender = request.get_response_sender()
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            if self._streams.handle(tensors, sender):
                return
            if flag(tensors, contract.STOP):
                self._stop(request.request_id(), sender)
                return
            parsed = parse_request(tensors, self._capabilities)
            if parsed.top_log_probs or parsed.prompt_log_probs >= 0:
                name = contract.TOP_LOG_PROBS if parsed.top_log_probs else contract.PROMPT_LOG_PROBS
                raise RequestRejectedError(f"{name}: is answered on step streams only")
            self._loop.submit(ActiveRequest(request.request_id(), parsed, RequestSink(sender, parsed)))
        except RequestRejectedError as rejection:
            send_error(sender, str(rejection))

    def _stop(self, request_id: str, sender: pb_utils.InferenceResponseSender) -> None:
        if not request_id:
            raise RequestRejectedError(f"{contract.STOP}: needs the request id of the request to stop")
        self._loop.stop_requests(request_id, lambda: sender.send(flags=FINAL))
