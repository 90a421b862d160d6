"""A request means the same to the engine whichever way it travels: alone, or with others in one message."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmops_engine.request import RequestRejectedError
from llmops_engine.steps.submissions import SubmissionReader
from llmops_engine.tensor_parser import EngineCapabilities, parse_request
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from llmops.contract import LORA_TASK_ID, PYTHON_ENGINE_INPUTS
from llmops.gateway.interfaces import EngineRequest, Guide, SamplingParams
from llmops.gateway.triton.request_writer import RequestWriter
from llmops.gateway.triton.step_writer import StepWriter

LIMITS = EngineCapabilities(
    target="openvino", max_seq_len=64, vocab_size=100, end_ids=frozenset({2, 3}), adapters=frozenset({4})
)
WRITER = RequestWriter("tiny-tensorrt_llm", vocab_size=100, pad_id=0)
SUBMISSIONS = SubmissionReader([{"name": one.name, "data_type": one.data_type} for one in PYTHON_ENGINE_INPUTS])
# what FP32 holds exactly: only then are the two ways alike to the last bit
HALVES = st.integers(1, 16).map(lambda n: n / 16)
IDS = st.integers(0, 99)

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=HALVES | st.just(0.0),
    top_p=HALVES,
    top_k=st.integers(0, 2**31 - 1),
    min_p=HALVES | st.just(0.0),
    repetition_penalty=HALVES,
    presence_penalty=HALVES,
    frequency_penalty=HALVES,
    seed=st.none() | st.integers(0, 2**64 - 1),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=st.just("x"),
    input_ids=st.lists(IDS, min_size=1, max_size=20),
    max_tokens=st.integers(1, 30),
    sampling=SAMPLINGS,
    n=st.integers(1, 8),
    end_ids=st.lists(IDS, max_size=3).map(tuple),
    stop_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    logprobs=st.booleans(),
    guide=st.none() | st.builds(Guide, st.just("regex"), st.text(min_size=1)),
    extras=st.sampled_from([{}, {LORA_TASK_ID: 4}]),
)


def received(message: service_pb2.ModelInferRequest) -> dict[str, np.ndarray]:
    """Return the tensors that the Python backend hands to the model.

    Triton's own client library decodes them.
    """
    found = {}
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        flat = deserialize_bytes_tensor(raw) if tensor.datatype == "BYTES" else np.frombuffer(raw, dtype_of(tensor))
        found[tensor.name] = flat.reshape(tensor.shape)
    return found


def dtype_of(tensor: Any) -> Any:
    return triton_to_np_dtype(InferInput(tensor.name, list(tensor.shape), tensor.datatype).datatype())


def submitted(*objects: Any, ids: int = 3) -> list[Any]:
    tensors = {
        "submissions": np.array(
            [[one if isinstance(one, bytes) else json.dumps(one).encode() for one in objects]], object
        ),
        "input_ids": np.arange(ids, dtype=np.int32)[None],
    }
    return list(SUBMISSIONS.read(tensors))


@given(st.lists(REQUESTS, min_size=1, max_size=4))
def test_requests_of_one_message_are_those_that_were_sent(requests: list[EngineRequest]) -> None:
    steps = StepWriter(WRITER, "abc")
    message = steps.submit([steps.submission(request, 7 + at) for at, request in enumerate(requests)])
    together = list(SUBMISSIONS.read(received(message)))
    assert [slot for slot, _ in together] == [7 + at for at in range(len(requests))]
    for request, (_, tensors) in zip(requests, together, strict=True):
        one, alone = parse_request(tensors, LIMITS), parse_request(received(WRITER.write(request)), LIMITS)
        assert one.input_ids.tolist() == alone.input_ids.tolist() == list(request.input_ids)
        one.input_ids = alone.input_ids
        assert one == alone


LEAST = {"input_lengths": 3, "request_output_len": 2}


SLOTS, LENGTHS = (2**31, -1, True, "1"), (4, -1)
NOT_UNDERSTOOD = {
    "not valid JSON": (b"{", b"\xff", b"[" * 100_000),
    "must be a JSON object": ([1],),
    "each submission needs slot": ({"input_lengths": 1}, *({"slot": one, "input_lengths": 1} for one in SLOTS)),
    "each submission needs input_lengths": ({"slot": 1}, *({"slot": 1, "input_lengths": one} for one in LENGTHS)),
    "1 tokens belong to no submission": ({"slot": 1, "input_lengths": 2},),
}


@pytest.mark.parametrize(("said", "wrong"), [(said, one) for said, all_ in NOT_UNDERSTOOD.items() for one in all_])
def test_a_message_that_is_not_understood_is_refused(said: str, wrong: Any) -> None:
    with pytest.raises(RequestRejectedError, match=f"^(submissions|input_ids): .*{said}"):
        submitted({"slot": 0, "input_lengths": 0}, wrong)


WRONG_VALUES = {
    "temperature: must be float32": ("hot", None, 1e39, float("nan")),
    "streaming: must be bool": (1,),
    "request_output_len: must be int32": (2.5, 2**31),
    "seed: must be uint64": (-1, 2**64),
    "stop_words_list: must be int32": (["ab", "cd"],),
    "stop_words_list: its rows must be equally long": ([[1, 2], [3]],),
    "prompt_table_extra_ids: must be uint64": ([1, -1],),
    "embedding_bias: must be float32": (["a", "b"],),
    "guided_decoding_guide: must be text in UTF-8": ("a\ud800", 5),
    "no_such_tensor: not an input of this model": (1,),
}


@pytest.mark.parametrize(("said", "value"), [(said, one) for said, all_ in WRONG_VALUES.items() for one in all_])
def test_a_value_that_its_datatype_cannot_hold_ends_its_own_request_only(said: str, value: Any) -> None:
    values = {said.partition(":")[0]: value}
    (_, wrong), (slot, other) = submitted({"slot": 0, **LEAST, **values}, {"slot": 1, **LEAST}, ids=6)
    assert isinstance(wrong, RequestRejectedError)
    assert str(wrong).startswith(said)
    assert (slot, other["input_ids"].tolist()) == (1, [3, 4, 5])
