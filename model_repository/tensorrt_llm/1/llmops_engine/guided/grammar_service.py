"""Compilation of grammars off the engine thread, so that no step waits for a compiler.

There are two lanes, each a thread with a sandbox process. A grammar is measured in the quick lane
first. A grammar that takes more than half a CPU second moves to the slow lane, so that it does not
delay other grammars. A grammar that passes is compiled again in this process, into the cache that
the engine's own pipeline uses. Everything runs at a low priority.

Callers take turns in each lane, so a caller with many grammars only delays itself, and the number
of waiting grammars is bounded. Each slow grammar costs the quick lane its process: while the slow
lane has a grammar of one caller, the caller's other grammars go straight there.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llmops_contract import GUIDE
from llmops_round_robin import RoundRobinQueue

from ..engine_runtime import Preparation
from ..request import RequestRejectedError
from .sandbox import GrammarLimitError, GrammarLimits, GrammarMeasurement, GrammarSandbox

if TYPE_CHECKING:
    from .openvino import GrammarPipeline

#: Maximum number of grammars whose outcome is remembered; the oldest outcome is forgotten. Bounds
#: memory against clients that send a new grammar with each request.
MAX_REMEMBERED_GRAMMARS = 1000
#: CPU seconds that a grammar may take to compile in the quick lane, before it moves to the slow
#: lane.
_QUICK_LANE_SECONDS = 0.5
#: Seconds that an idle lane keeps its sandbox process, whose start takes seconds and whose caches
#: take memory.
_IDLE_SECONDS = 120.0
#: Number of finished answers after which a grammar is trusted: if the engine becomes slow, grammars
#: with fewer answers are suspected first.
_TRUSTED_AFTER_ANSWERS = 3
#: Maximum number of repeated measurements of a grammar that is slightly over a limit of time.
_MAX_REMEASUREMENTS = 2
#: Factor over a limit of time from which on a grammar is not measured again: a busy host can only
#: cause a smaller excess.
_REMEASURE_BELOW = 5
#: Niceness of the quick lane. With this value, the lane gets about a tenth of a core beside an engine
#: that uses all cores.
_NICENESS = 9

Guide = tuple[str, str]


class GrammarService:
    """The compiler and cache of one engine's grammars. Only the engine thread may call it."""

    def __init__(
        self,
        new_sandbox: Callable[[int], GrammarSandbox],
        new_compiler: Callable[[], GrammarPipeline],
        wake: Callable[[], None],
        limits: GrammarLimits | None = None,
    ) -> None:
        """Create both lanes, whose threads start with their first grammar.

        Args:
            new_sandbox: Creates a sandbox whose process runs at the given niceness.
            new_compiler: Creates the pipeline that compiles into the engine's cache.
            wake: Called from a lane when a grammar is ready or rejected.
            limits: The limits of time, memory and queue length. None stands for the defaults.
        """
        self._limits = limits = limits or GrammarLimits()
        self._known: OrderedDict[bytes, _GrammarTask] = OrderedDict()
        slow = _CompileLane("grammar-slow", limits, new_sandbox, new_compiler, wake)
        quick_limits = replace(
            limits,
            compile_seconds=min(_QUICK_LANE_SECONDS, limits.compile_seconds),
            niceness=min(_NICENESS, limits.niceness),
        )
        self._lanes = [_CompileLane("grammar", quick_limits, new_sandbox, new_compiler, wake, slow), slow]

    @property
    def memory(self) -> int:
        """Estimate the bytes that all compiled grammars take."""
        return sum(lane.memory for lane in self._lanes)

    def prepare(self, guide: Guide, caller: str = "") -> Preparation | None:
        """Return the preparation to wait for, or None if `guide` can join the batch at once.

        Args:
            guide: The kind of the grammar and the grammar's text.
            caller: The name under which the grammar queues. Callers take turns; `a/b` takes turns
                as `b` within the turns of `a`.

        Raises:
            RequestRejectedError: The grammar was rejected before, or too many grammars wait.
        """
        key = _key(guide)
        known = self._known.get(key)
        if known is None or not known.add_waiter():
            self._check_queue(caller)
            known = self._known[key] = _GrammarTask(guide, caller)
            known.add_waiter()
            self._lanes[0].put(known)
            self._forget_oldest()
        self._known.move_to_end(key)
        if known.rejection:
            raise RequestRejectedError(known.rejection)
        return None if known.done else known

    def mean_seconds(self, guide: Guide) -> float:
        """Return the mean seconds per token of a compiled grammar."""
        known = self._known.get(_key(guide))
        return known.measured.mean_seconds if known is not None else 0.0

    def suspicion(self, guide: Guide) -> tuple[bool, float]:
        """Return a value that is higher the more likely a grammar is to cost too much.

        Grammars with few finished answers rank first, then those that took longest when they were
        measured.
        """
        known = self._known.get(_key(guide))
        return (
            (True, 0.0)
            if known is None
            else (known.finished_answers < _TRUSTED_AFTER_ANSWERS, known.measured.token_seconds)
        )

    def record_finished(self, guide: Guide) -> None:
        """Count an answer that finished while it followed this grammar."""
        known = self._known.get(_key(guide))
        if known is not None:
            known.finished_answers += 1

    def reject(self, guide: Guide, reason: str) -> None:
        """Reject this grammar in all later requests."""
        task = self._known[_key(guide)] = _GrammarTask(guide, "")
        task.finish(reason)
        self._forget_oldest()

    def copy_rejections(self, other: GrammarService) -> None:
        """Reject the grammars that `other` rejects."""
        self._known.update((key, task) for key, task in other._known.items() if task.done and task.rejection)

    def knows(self, guide: Guide) -> bool:
        """Return True if the grammar was compiled or rejected."""
        known = self._known.get(_key(guide))
        return known is not None and known.done and not known.dropped

    def _check_queue(self, caller: str) -> None:
        name, limits = caller.split("/")[0], self._limits
        if sum(lane.waiting(name) for lane in self._lanes) >= limits.waiting_per_caller:
            raise RequestRejectedError(
                f"unavailable for new grammars: {limits.waiting_per_caller} new grammars of this client are "
                "already waiting; retry later"
            )
        if sum(lane.waiting() for lane in self._lanes) >= limits.waiting:
            raise RequestRejectedError(
                f"unavailable for new grammars: {limits.waiting} new grammars are already waiting; retry later"
            )

    def _forget_oldest(self) -> None:
        if len(self._known) > MAX_REMEMBERED_GRAMMARS:
            key = next((key for key, task in self._known.items() if task.done), None)
            if key is not None:
                del self._known[key]

    def close(self, wait: bool = True) -> None:
        """End both lanes and reject the waiting grammars.

        Without `wait`, a running compilation may continue for a while.
        """
        for lane in self._lanes:
            lane.close(wait)
        for task in self._known.values():
            if not task.done:
                task.finish("unavailable for new grammars at the moment; send the request again")


def _key(guide: Guide) -> bytes:
    return hashlib.sha256(repr(guide).encode()).digest()


class _GrammarTask(Preparation):
    """A grammar with the state of its compilation."""

    def __init__(self, guide: Guide, caller: str) -> None:
        super().__init__()
        self.guide = guide
        self.caller = caller
        self.path = caller.split("/", 1)
        self.measured = GrammarMeasurement()
        self.finished_answers = 0


class _CompileLane:
    """A queue of grammars, with a thread that starts with the first one."""

    def __init__(
        self,
        name: str,
        limits: GrammarLimits,
        new_sandbox: Callable[[int], GrammarSandbox],
        new_compiler: Callable[[], GrammarPipeline],
        wake: Callable[[], None],
        slower: _CompileLane | None = None,
    ) -> None:
        self._limits = limits
        self._sandbox = new_sandbox(limits.niceness)
        self._new_compiler = new_compiler
        self._compiler: GrammarPipeline | None = None
        self._wake = wake
        self._slower = slower
        self.memory = 0
        self._tasks: RoundRobinQueue[_GrammarTask] = RoundRobinQueue()
        self._callers: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, task: _GrammarTask) -> None:
        """Add a grammar to the queue."""
        with self._changed:
            self._tasks.put(task.path, task)
            self._callers[task.caller] += 1
            self._changed.notify()
            if self._thread.ident is None:
                self._thread.start()

    def waiting(self, name: str | None = None) -> int:
        """Return the number of waiting grammars of the caller `name`, or of all callers."""
        with self._changed:
            return self._tasks.size if name is None else self._tasks.waiting(name)

    def serves(self, caller: str) -> bool:
        """Return True if a grammar of `caller` waits or is being compiled."""
        with self._changed:
            return self._callers[caller] > 0

    def close(self, wait: bool) -> None:
        """End the lane's process and its thread."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._sandbox.end()
        if wait and self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._limits.niceness)
        while self._is_open:
            task = self._next()
            if task is None:
                self._sandbox.close()
            else:
                self._handle(task)
                with self._changed:
                    self._callers -= Counter([task.caller])

    def _handle(self, task: _GrammarTask) -> None:
        if task.drop_if_unwanted():
            return
        if self._slower is not None and self._slower.serves(task.caller):
            self._slower.put(task)
        else:
            self._settle(task)

    def _next(self) -> _GrammarTask | None:
        """Return the next grammar, or None if the lane ends or had no work for a long time."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks.size or not self._is_open, _IDLE_SECONDS)
            return self._tasks.take() if self._tasks.size and self._is_open else None

    def _settle(self, task: _GrammarTask) -> None:
        """Compile a grammar, or move it to the slow lane if it takes too long for this lane."""
        try:
            rejection = self._compile(task)
        except GrammarLimitError as error:
            if error.slow and self._slower is not None:
                self._slower.put(task)
                return
            rejection = str(error)
        except Exception as error:  # noqa: BLE001 - the waiting requests must be notified, whatever happens
            rejection = f"the grammar could not be compiled: {error}"
            task.dropped = True  # the next attempt may succeed
        task.finish(f"{GUIDE}: {rejection}" if rejection else "")
        self._wake()

    def _compile(self, task: _GrammarTask) -> str | None:
        """Measure and compile a grammar. Return the reason for a rejection, or None."""
        measured = task.measured = self._measure(task.guide)
        rejection = measured.problem or _cost_problem(measured, self._limits)
        if rejection:
            return rejection
        if self._compiler is None:
            self._compiler = self._new_compiler()
        self.memory += measured.memory
        return self._compiler.compile(task.guide)

    def _measure(self, guide: Guide) -> GrammarMeasurement:
        """Measure a grammar, several times if it is slightly over a limit.

        A wrong rejection would last, because rejections are remembered. On a host whose processor
        is shared with other machines, even CPU times vary.
        """
        measured = self._sandbox.measure(guide, self._limits)
        for _ in range(_MAX_REMEASUREMENTS):
            if measured.problem or not (measured.grows or 1 < _cost_ratio(measured, self._limits) < _REMEASURE_BELOW):
                break
            again = self._sandbox.measure(guide, self._limits)
            measured = replace(
                measured,
                join_seconds=min(measured.join_seconds, again.join_seconds),
                token_seconds=min(measured.token_seconds, again.token_seconds),
                mean_seconds=min(measured.mean_seconds, again.mean_seconds),
                grows=measured.grows and again.grows,
            )
        return measured


def _cost_ratio(measured: GrammarMeasurement, limits: GrammarLimits) -> float:
    """Return the larger ratio of a time to its limit: of joining a batch, or per token."""
    return max(measured.join_seconds / limits.join_seconds, measured.token_seconds / limits.token_seconds)


def _cost_problem(measured: GrammarMeasurement, limits: GrammarLimits) -> str | None:
    """Return the reason why a grammar costs too much, or None."""
    if measured.join_seconds > limits.join_seconds:
        return f"the grammar is too large: it takes {measured.join_seconds:.2f} s to start, once compiled; shorten it"
    if measured.token_seconds > limits.token_seconds:
        return f"the grammar takes {measured.token_seconds * 1000:.0f} ms per token to follow; simplify it"
    if measured.grows:
        return "the grammar takes longer to follow with each token of the answer; simplify it"
    if measured.memory > limits.memory:
        return f"the grammar takes more than {limits.memory >> 20} MiB of memory; shorten it"
    return None
