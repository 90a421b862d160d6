"""The messages that a gateway sends in a step stream (docs/contract.md, "Step streams")."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from tritonclient.grpc import service_pb2

from llmops import contract
from llmops.gateway.interfaces import EngineRequest
from llmops.gateway.triton.request_writer import JsonTensorWriter, MessageTensorWriter, RequestWriter


class Submission(NamedTuple):
    """A request for a slot. `tensors` is a JSON object with all tensors except the token ids."""

    slot: int
    input_ids: array[int]
    tensors: bytes


class StepWriter:
    """A writer of the messages in one subscription."""

    def __init__(self, requests: RequestWriter, subscription: str) -> None:
        self._requests = requests
        self._subscription = subscription

    def submission(self, request: EngineRequest, slot: int) -> Submission:
        tensors = JsonTensorWriter()
        tensors.scalar(contract.SLOT, slot)
        self._requests.write_rest(request, tensors)
        return Submission(slot, array("i", request.input_ids), tensors.encoded())

    def submit(self, submissions: Sequence[Submission]) -> service_pb2.ModelInferRequest:
        """Return one message with several submissions.

        The engine replies to the message itself only with an error, whose id lists the slots.
        """
        message, tensors = self._message()
        message.id = ",".join(str(submission.slot) for submission in submissions)
        input_ids = array("i")
        for submission in submissions:
            input_ids += submission.input_ids
        tensors.ids(contract.INPUT_IDS, input_ids)
        tensors.texts(contract.SUBMISSIONS, [submission.tensors for submission in submissions])
        return message

    def subscribe(self, resume_from: int, watch: bool = False) -> service_pb2.ModelInferRequest:
        message, tensors = self._message()
        message.id = self._subscription
        message.parameters[contract.EMPTY_FINAL_PARAMETER].bool_param = True
        tensors.scalar(contract.RESUME_FROM, resume_from)
        if watch:
            tensors.scalar(contract.WATCH_STATE, True)
        return message

    def acknowledge(self, step: int, demand: tuple[int, int] | None = None) -> service_pb2.ModelInferRequest:
        """Return a message that acknowledges a step.

        Args:
            step: Index of the last step that arrived.
            demand: The tokens and the weights that wait in this gateway, or None if unchanged.
        """
        message, tensors = self._message_without_reply()
        tensors.scalar(contract.ACKNOWLEDGE, step)
        if demand is not None:
            tensors.ids(contract.DEMAND, demand)
        return message

    def cancel(self, slot: int) -> service_pb2.ModelInferRequest:
        message, tensors = self._message_without_reply()
        tensors.scalar(contract.SLOT, slot)
        tensors.scalar(contract.STOP, True)
        return message

    def leave(self) -> service_pb2.ModelInferRequest:
        message, tensors = self._message_without_reply()
        tensors.scalar(contract.STOP, True)
        return message

    def drain(self) -> service_pb2.ModelInferRequest:
        """Return the message that makes the engine reject new requests, from any gateway."""
        message, tensors = self._message_without_reply()
        tensors.scalar(contract.DRAIN, True)
        return message

    def _message_without_reply(self) -> tuple[service_pb2.ModelInferRequest, MessageTensorWriter]:
        message, tensors = self._message()
        message.id = contract.NO_REPLY_ID
        return message, tensors

    def _message(self) -> tuple[service_pb2.ModelInferRequest, MessageTensorWriter]:
        """Return a message without a request.

        NVIDIA's contract requires two lengths, which are 0.
        """
        message = service_pb2.ModelInferRequest(model_name=self._requests.model)
        tensors = MessageTensorWriter(message)
        tensors.scalar(contract.INPUT_LENGTHS, 0)
        tensors.scalar(contract.REQUEST_OUTPUT_LEN, 0)
        tensors.text(contract.SUBSCRIPTION, self._subscription)
        return message, tensors


def parse_slots(message_id: str) -> list[int]:
    """Return the slots in the id of a submission, or no slots for another message's id."""
    parts = message_id.split(",")
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else []
