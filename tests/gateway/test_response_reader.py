"""Tokens and log-probs out of Triton's responses, as each kind of engine model sends them."""

import struct

from tritonclient.grpc import service_pb2

from llmops.gateway.triton.response_reader import ResponseReader


def response(ids: list[int], log_probs: list[float]) -> service_pb2.ModelInferResponse:
    made = service_pb2.ModelInferResponse()
    for name, kind, values in (("output_ids", "i", ids), ("output_log_probs", "f", log_probs)):
        made.outputs.add(name=name, shape=[1, 1, len(values)])
        made.raw_output_contents.append(struct.pack(f"<{len(values)}{kind}", *values))
    return made


def test_the_c_backend_sends_new_ids_with_the_log_probs_of_all() -> None:
    reader = ResponseReader(logprobs=True)
    found = [
        reader.read(response([11], [-0.5])),
        reader.read(response([12], [-0.5, -1.5])),
        reader.read(response([13, 14], [-0.5, -1.5, -2.5, -3.5])),
    ]
    assert [(one.tokens, one.logprobs) for one in found] == [([11], [-0.5]), ([12], [-1.5]), ([13, 14], [-2.5, -3.5])]
