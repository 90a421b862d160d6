"""The drain of a running Triton's engines, before Triton receives SIGTERM.

A Triton that is unloading accepts no messages, not even a gateway's acknowledgement or
cancellation. `llmops serve` drains by itself. This command drains a tritonserver that was started
in another way:

    python -m llmops.model_repository.server.drain HOST:PORT SECONDS
"""

import contextlib
import sys

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmops import contract
from llmops.contract import ENGINE_SUFFIX

#: Timeout in seconds of a call that Triton answers at once.
RPC_TIMEOUT = 5.0
#: Maximum seconds in which the engines must end the answers that are cut off.
_FORCED_END_TIMEOUT = 10.0
#: gRPC options: no proxy for a local server, and no back-off that another channel has caused.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


def is_ready(address: str) -> bool:
    """Return True if the Triton at HOST:PORT has loaded all models."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return bool(stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=RPC_TIMEOUT).ready)
        except grpc.RpcError:
            return False


def drain_engines(address: str, seconds: float) -> None:
    """Block until all running requests of the engines at HOST:PORT have ended.

    After `seconds`, the remaining requests end with an error. A server that does not respond is
    skipped.
    """
    with grpc.insecure_channel(address, options=_OPTIONS) as channel, contextlib.suppress(grpc.RpcError):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        models = _engines(stub)
        if models and not _drain(stub, models, seconds):
            _drain(stub, models, _FORCED_END_TIMEOUT, end_now=True)


def _engines(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> list[str]:
    """Return the names of the engine models: the models that have an input `drain`."""
    index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=RPC_TIMEOUT)
    names = sorted({entry.name for entry in index.models if entry.name.endswith(ENGINE_SUFFIX)})
    configs = {
        name: stub.ModelConfig(service_pb2.ModelConfigRequest(name=name), timeout=RPC_TIMEOUT).config for name in names
    }
    return [name for name in names if any(tensor.name == contract.DRAIN.name for tensor in configs[name].input)]


def _drain(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, models: list[str], seconds: float, end_now: bool = False
) -> bool:
    """Drain all models at once, over one stream. Return False if this takes more than `seconds`.

    `end_now` ends the running requests with an error.
    """
    requests = [_drain_request(model, end_now) for model in models]
    try:
        list(stub.ModelStreamInfer(iter(requests), timeout=max(seconds, 0.01)))
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return False
    return True


def _drain_request(model: str, end_now: bool) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    tensors = {
        contract.INPUT_LENGTHS: bytes(4),
        contract.REQUEST_OUTPUT_LEN: bytes(4),
        contract.DRAIN: b"\x01",
        contract.STOP: bytes([end_now]),
    }
    for tensor, raw in tensors.items():
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1, 1])
        request.raw_input_contents.append(raw)
    return request


if __name__ == "__main__":
    drain_engines(sys.argv[1], float(sys.argv[2]))
