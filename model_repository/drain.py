"""Ask the engines of a running Triton to finish what they have and take nothing new, before it is shut down.

A gateway's step stream is an in-flight request for Triton, so without this a shutdown waits for its exit timeout.
"""

from __future__ import annotations

import contextlib

from llmops.model_repository.names import ENGINE

TIMEOUT = 5.0


def drain_engines(address: str) -> None:
    """`address` is HOST:PORT of Triton's gRPC endpoint. A server that does not answer is left alone."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=TIMEOUT)
        for model in {entry.name for entry in index.models if entry.name.endswith(ENGINE)}:
            config = stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=TIMEOUT).config
            if any(tensor.name == "drain" for tensor in config.input):
                list(stub.ModelStreamInfer(iter([_drain_request(model)]), timeout=TIMEOUT))


def _drain_request(model: str) -> object:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    for name, datatype, raw in (
        ("input_lengths", "INT32", bytes(4)),
        ("request_output_len", "INT32", bytes(4)),
        ("drain", "BOOL", b"\x01"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(raw)
    return request
