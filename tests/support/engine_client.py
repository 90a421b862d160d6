"""A client of the engine contract with tritonclient.

Tests use it to call NAME-tensorrt_llm directly.
"""

import queue
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

from tests.support.waiting import GENEROUS

ENGINE = "smollm2-tensorrt_llm"
TEXTS = ("guided_decoding_guide_type", "guided_decoding_guide", "caller")
#: Types of tensors; all others are INT32.
DTYPES = {"streaming": np.bool_, "temperature": np.float32, **dict.fromkeys(TEXTS, np.object_)}


@dataclass
class Answer:
    """All that came back for one request."""

    ids: list[int] = field(default_factory=list)
    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    error: str | None = None


class EngineClient:
    """One gRPC stream; requests by id. Closing it cancels what still runs."""

    def __init__(self, address: str) -> None:
        self._client = grpc.InferenceServerClient(address)
        self._arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def send(self, request_id: str, model: str = ENGINE, **tensors: Any) -> None:
        inputs = [infer_input(name, value) for name, value in tensors.items()]
        self._client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)

    def receive(self, timeout: float = GENEROUS) -> tuple[str, dict[str, np.ndarray], bool, str | None]:
        """(request id, tensors, final, error) of the next response."""
        result, error = self._arrived.get(timeout=timeout)
        if error is not None:
            return "", {}, True, error.message()
        response = result.get_response()
        tensors = {output.name: result.as_numpy(output.name) for output in response.outputs}
        return response.id, tensors, response.parameters["triton_final_response"].bool_param, None

    def collect(self, count: int = 1) -> dict[str, Answer]:
        """Answers of the next `count` requests that end, by request id."""
        answers: dict[str, Answer] = {}
        while count:
            request_id, tensors, final, error = self.receive()
            answer = answers.setdefault(request_id, Answer())
            answer.error = error or answer.error
            if "output_ids" in tensors:
                _add(answer, tensors)
            count -= final
        return answers

    def ask(self, ids: list[int], **tensors: Any) -> Answer:
        self.send("one", **generation(ids, **tensors))
        return next(iter(self.collect().values()))

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def generation(ids: list[int], new: int = 16, **tensors: Any) -> dict[str, Any]:
    """The tensors of a greedy streamed request."""
    prompt = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": new}
    given = {**prompt, "streaming": True, "temperature": 0.0, **tensors}
    return {name: value for name, value in given.items() if value is not None}


def infer_input(name: str, value: Any) -> Any:
    dtype = DTYPES.get(name, np.int32)
    if dtype is np.object_:
        value = value.encode()
    array = np.array([value] if isinstance(value, list) else [[value]], dtype=dtype)
    tensor = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def metrics(url: str, family: str) -> dict[str, float]:
    """Values of one TensorRT-LLM family by the value of its category label."""
    from prometheus_client.parser import text_string_to_metric_families

    text = urllib.request.urlopen(url, timeout=GENEROUS).read().decode()
    found = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            if sample.name == family and sample.labels["model"] == ENGINE:
                (category,) = [value for key, value in sample.labels.items() if key not in ("model", "version")]
                found[category] = sample.value
    return found


def _add(answer: Answer, tensors: dict[str, np.ndarray]) -> None:
    answer.responses.append(tensors)
    ids = tensors["output_ids"].reshape(-1).tolist()
    assert (tensors["output_ids"].shape, tensors["sequence_length"].item()) == ((1, 1, len(ids)), len(ids))
    answer.ids.extend(ids)
