"""The handler of step-stream messages: subscribe, submit, cancel, acknowledge, leave and drain."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import llmops_contract as contract
from llmops_contract import CANCELLED_FLAG, ERROR_FLAG, LAST_OF_SEQUENCE, LAST_OF_SLOT

from ..engine_runtime import Alternatives, EngineState
from ..loop import ActiveRequest, EngineLoop
from ..request import RequestRejectedError, RuntimeRequest
from ..tensor_parser import EngineCapabilities, Tensors, flag, parse_request, scalar, text
from .kv_event_queue import KvCacheContents, KvEventQueue
from .sinks import FINAL, TritonStepSender, send_error
from .submissions import SubmissionReader
from .subscription import Subscription

if TYPE_CHECKING:
    from triton_python_backend_utils import InferenceResponseSender

#: Seconds between two checks for broken streams while no step runs. While steps run, each step is
#: followed by a check.
IDLE_CHECK = 0.1
DRAINING_MESSAGE = f"{contract.DRAINING_PREFIX}: the engine is shutting down and takes no new requests"
CUT_OFF_MESSAGE = (
    f"{contract.DRAINING_PREFIX}: the engine is shutting down, and its exit timeout ended before this answer was "
    "complete"
)


class StepSink:
    """The receiver of a request's tokens that sends them in the steps of a subscription."""

    __slots__ = ("_slot", "_subscription")

    def __init__(self, subscription: Subscription, slot: int) -> None:
        self._subscription = subscription
        self._slot = slot

    def begin(self, sequence: int, cached: int | None, prompt: list[Alternatives]) -> None:
        self._subscription.begin(self._slot, sequence, cached, prompt)

    def add_tokens(
        self,
        sequence: int,
        ids: list[int],
        log_probs: list[float],
        finished: bool,
        last_sequence: bool,
        tops: list[Alternatives],
    ) -> None:
        flags = (LAST_OF_SEQUENCE if finished else 0) | (LAST_OF_SLOT if last_sequence else 0)
        self._subscription.add(self._slot, sequence, ids, log_probs, flags, tops=tops)

    def fail(self, message: str) -> None:
        self._end(ERROR_FLAG, message)

    def end(self) -> None:
        self._end(CANCELLED_FLAG)

    def is_cancelled(self) -> bool:
        return self._subscription.lost

    def _end(self, reason: int, message: str = "") -> None:
        flags = LAST_OF_SEQUENCE | LAST_OF_SLOT | reason
        self._subscription.add(self._slot, 0, [], [], flags, message)


class StepStreamServer:
    """The step streams of one engine model.

    Messages are handled on the engine thread, which owns all of the state.
    """

    def __init__(
        self,
        loop: EngineLoop,
        capabilities: EngineCapabilities,
        submissions: SubmissionReader,
        identity: tuple[str, ...],
    ) -> None:
        """Attach the server to an engine loop.

        `identity` has the model, its version, the engine and the instance, for gateways that watch
        the engine.
        """
        self._loop = loop
        self._capabilities = capabilities
        self._submissions = submissions
        self._identity = identity
        self._kv_cache = KvCacheContents()
        self._subscriptions: dict[str, Subscription] = {}
        self._draining = False
        # response streams of `drain` messages, which end when no request runs any longer
        self._drain_senders: list[InferenceResponseSender] = []
        loop.after_step = self._after_step

    def handle(self, tensors: Tensors, sender: InferenceResponseSender) -> bool:
        """Handle a step-stream message. Return False if `tensors` are an ordinary request instead.

        Raises:
            RequestRejectedError: The message is malformed, or the engine is draining.
        """
        if flag(tensors, contract.DRAIN):
            end_now = flag(tensors, contract.STOP)
            self._loop.post(lambda: self._drain(end_now, sender))
        elif name := text(tensors, contract.SUBSCRIPTION):
            self._route(name, tensors, sender)
        elif self._draining:
            raise RequestRejectedError(DRAINING_MESSAGE)
        else:
            return False
        return True

    def _route(self, name: str, tensors: Tensors, sender: InferenceResponseSender) -> None:
        if contract.SUBMISSIONS.name in tensors:
            requests = [(slot, self._parse(submission)) for slot, submission in self._submissions.read(tensors)]
            self._loop.post(lambda: self._submit(name, requests, sender))
            return
        slot = scalar(tensors, contract.SLOT)
        acknowledged = scalar(tensors, contract.ACKNOWLEDGE)
        if acknowledged is not None:
            demand = _demand(tensors)
            self._loop.post(lambda: self._acknowledge(name, acknowledged, demand, sender))
        elif slot is None and flag(tensors, contract.STOP):
            self._loop.post(lambda: self._leave(name, sender))
        elif slot is None:
            resume_from, watch = scalar(tensors, contract.RESUME_FROM), flag(tensors, contract.WATCH_STATE)
            self._loop.post(lambda: self._subscribe(name, resume_from, watch, sender))
        elif flag(tensors, contract.STOP):
            self._loop.post(lambda: self._cancel(name, slot, sender))
        else:
            raise RequestRejectedError(
                f"{contract.SLOT}: needs {contract.STOP}; requests belong in {contract.SUBMISSIONS}"
            )

    def _parse(self, submission: Tensors | RequestRejectedError) -> RuntimeRequest | RequestRejectedError:
        if isinstance(submission, RequestRejectedError):
            return submission
        try:
            return parse_request(submission, self._capabilities)
        except RequestRejectedError as rejection:
            return rejection

    def _subscribe(self, name: str, resume_from: int, watch: bool, sender: InferenceResponseSender) -> None:
        subscription = self._subscriptions.get(name)
        if self._draining and subscription is None:
            send_error(sender, DRAINING_MESSAGE)
            return
        if subscription is None and resume_from == 0:
            subscription = self._subscriptions[name] = Subscription(identity=self._identity)
            subscription.kv_events = KvEventQueue(self._kv_cache) if watch else None
        if subscription is None or not subscription.attach(TritonStepSender(sender), resume_from, time.monotonic()):
            send_error(sender, contract.UNKNOWN_SUBSCRIPTION)

    def _submit(
        self,
        name: str,
        requests: list[tuple[int, RuntimeRequest | RequestRejectedError]],
        sender: InferenceResponseSender,
    ) -> None:
        subscription = self._subscriptions.get(name)
        if subscription is None:
            send_error(sender, contract.UNKNOWN_SUBSCRIPTION)
            return
        sender.send(flags=FINAL)
        for slot, request in requests:
            if subscription.claim(slot):
                self._start(name, subscription, slot, request)

    def _start(
        self, name: str, subscription: Subscription, slot: int, request: RuntimeRequest | RequestRejectedError
    ) -> None:
        sink = StepSink(subscription, slot)
        if self._draining or isinstance(request, RequestRejectedError):
            sink.fail(DRAINING_MESSAGE if self._draining else str(request))
            return
        request.caller = request.caller or name
        active = subscription.open[slot] = ActiveRequest("", request, sink)
        self._loop.admit(active)

    def _cancel(self, name: str, slot: int, sender: InferenceResponseSender) -> None:
        sender.send(flags=FINAL)
        subscription = self._subscriptions.get(name)
        if subscription is not None and slot in subscription.open:
            self._loop.end(subscription.open[slot])

    def _acknowledge(self, name: str, index: int, demand: int | None, sender: InferenceResponseSender) -> None:
        sender.send(flags=FINAL)
        subscription = self._subscriptions.get(name)
        if subscription is not None:
            subscription.acknowledge(index, time.monotonic())
            if demand is not None:
                subscription.demand = demand

    def _leave(self, name: str, sender: InferenceResponseSender) -> None:
        """Drop the subscription of a gateway that shuts down and so will not fetch its answers."""
        sender.send(flags=FINAL)
        if name in self._subscriptions:
            self._subscriptions[name].close()

    def _drain(self, end_now: bool, sender: InferenceResponseSender) -> None:
        """Reject new requests. If `end_now` is set, end the running requests with an error."""
        self._draining = True
        self._drain_senders.append(sender)
        if end_now:
            self._loop.fail_open(CUT_OFF_MESSAGE)

    def _after_step(self, idle: bool) -> float | None:
        """Flush and check all subscriptions.

        Return the seconds after which the loop must call this method again if it is idle, or None
        if it need not.
        """
        now, state = time.monotonic(), self._update_watchers()
        for name, subscription in list(self._subscriptions.items()):
            subscription.flush(now, state)
            subscription.check(now)
            if self._draining and idle and subscription.is_settled:
                subscription.close()
            if subscription.lost:
                del self._subscriptions[name]
        if self._draining and idle and not self._subscriptions:
            for sender in self._drain_senders:
                sender.send(flags=FINAL)
            self._drain_senders.clear()
        return IDLE_CHECK if self._subscriptions or self._drain_senders else None

    def _update_watchers(self) -> EngineState | None:
        """Queue new cache events for all gateways that watch the engine.

        Return the engine's state, or None if no gateway watches.
        """
        events = list(self._loop.take_kv_events())
        self._kv_cache.apply(events)
        queues = [one.kv_events for one in self._subscriptions.values() if one.kv_events is not None]
        if not queues:
            return None
        if events:
            for queue in queues:
                queue.add(events)
        return self._loop.state()._replace(
            subscribers=len(self._subscriptions),
            demand=sum(subscription.demand for subscription in self._subscriptions.values()),
            draining=int(self._draining),
        )


def _demand(tensors: Tensors) -> int | None:
    """Return the sum of the weights of the requests that wait in a gateway.

    The sum is the second number of the tensor `demand`. The result is None without the tensor.
    """
    values = tensors.get(contract.DEMAND.name)
    if values is None or values.size == 0:
        return None
    if values.size != 2 or values.min() < 0:
        raise RequestRejectedError(f"{contract.DEMAND}: must be two non-negative numbers")
    return int(values.reshape(-1)[1])
