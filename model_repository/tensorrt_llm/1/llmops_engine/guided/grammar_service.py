"""Grammars are made ready beside the engine thread, so that no step waits for a compiler.

Two lanes, each a thread with a probe process. A grammar is measured in the quick lane first; one that takes longer than
a moment moves to the slow lane, so that it does not hold up others. What passes is compiled again in this process, into
the cache that the engine's own pipeline uses. Everything runs at a low priority. Callers take turns in each lane, so
that whoever brings many grammars waits for them alone, and the number that may wait is bounded. Every slow grammar
costs the quick lane its process: while the slow lane has three of one caller, the caller's others go straight there.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from llmops_contract import GUIDE
from llmops_round_robin import RoundRobinQueue

from ..engine_runtime import Preparation
from ..request import RequestRejectedError
from .sandbox import GrammarLimitError, GrammarLimits, GrammarMeasurement, GrammarSandbox

# grammars whose outcome is remembered
MAX_REMEMBERED_GRAMMARS = 1000
# how long a grammar may take in the quick lane (CPU seconds; a walk takes 0.1 to 0.2), and how long an idle lane keeps
# its process (s)
_QUICK_LANE_SECONDS, _IDLE_SECONDS = 0.5, 120.0
_MAX_SLOW_PER_CALLER = 3
# answers after which a grammar is not the first that is suspected
_TRUSTED_AFTER_ANSWERS = 3
# a time over its limit is doubted so many times while it is less than so many times the limit
_MAX_REMEASUREMENTS, _REMEASURE_BELOW = 2, 5
# the quick lane's: a tenth of a core beside an engine that takes all of them
_NICENESS = 9

Guide = tuple[str, str]


class GrammarCompiler(Protocol):
    def compile(self, guide: Guide) -> str | None: ...


class GrammarService:
    """`prepare` and `close` from the engine thread; `wake` is called from a lane when a grammar is ready or refused."""

    def __init__(
        self,
        new_probe: Callable[[int], GrammarSandbox],
        new_compiler: Callable[[], GrammarCompiler],
        wake: Callable[[], None],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits = limits or GrammarLimits()
        self._known: OrderedDict[bytes, _GrammarTask] = OrderedDict()
        slow = _CompileLane("grammar-slow", limits, new_probe, new_compiler, wake)
        quick = replace(
            limits,
            compile_seconds=min(_QUICK_LANE_SECONDS, limits.compile_seconds),
            niceness=min(_NICENESS, limits.niceness),
        )
        self._lanes = [_CompileLane("grammar", quick, new_probe, new_compiler, wake, slow), slow]

    @property
    def memory(self) -> int:
        """Bytes of all grammars that were compiled, about; the library keeps them as long as its tokenizer."""
        return sum(lane.memory for lane in self._lanes)

    def prepare(self, guide: Guide, caller: str = "") -> Preparation | None:
        """None when `guide` can join the batch at once. `caller`: who asks, `a/b` for `b` of `a`'s.

        Raises Refused when it is known to be no good, and when too many wait.
        """
        key = _key(guide)
        known = self._known.get(key)
        if known is None or not known.join():
            self._refuse_beyond_bounds(caller)
            known = self._known[key] = _GrammarTask(guide, caller)
            known.join()
            self._lanes[0].put(known)
            self._forget_oldest()
        self._known.move_to_end(key)
        if known.refusal:
            raise RequestRejectedError(known.refusal)
        return None if known.done else known

    def mean_seconds(self, guide: Guide) -> float:
        """Return the seconds that a compiled grammar takes per token as a rule."""
        known = self._known.get(_key(guide))
        return known.measured.mean_seconds if known is not None else 0.0

    def suspicion(self, guide: Guide) -> tuple[bool, float]:
        """Return a value that is higher the more likely a grammar is to cost too much.

        Grammars that few answers were finished with come first, then those that took longest when they were tried.
        """
        known = self._known.get(_key(guide))
        return (True, 0.0) if known is None else (known.finished < _TRUSTED_AFTER_ANSWERS, known.measured.token_seconds)

    def finished(self, guide: Guide) -> None:
        """An answer with this grammar was finished."""
        known = self._known.get(_key(guide))
        if known is not None:
            known.finished += 1

    def refuse(self, guide: Guide, why: str) -> None:
        """Refuse a grammar from now on."""
        task = self._known[_key(guide)] = _GrammarTask(guide, "")
        task.finish(why)
        self._forget_oldest()

    def copy_refusals(self, other: GrammarService) -> None:
        """Refuse what `other` refused."""
        self._known.update((key, task) for key, task in other._known.items() if task.done and task.refusal)

    def knows(self, guide: Guide) -> bool:
        """Whether it is compiled, or refused."""
        known = self._known.get(_key(guide))
        return known is not None and known.done and not known.dropped

    def _refuse_beyond_bounds(self, caller: str) -> None:
        name = caller.split("/")[0]
        if sum(lane.waiting(name) for lane in self._lanes) >= self._limits.waiting_per_caller:
            raise RequestRejectedError(
                f"unavailable for new grammars: {self._limits.waiting_per_caller} of this client are already waiting"
            )
        if sum(lane.waiting() for lane in self._lanes) >= self._limits.waiting:
            raise RequestRejectedError(f"unavailable for new grammars: {self._limits.waiting} are already waiting")

    def _forget_oldest(self) -> None:
        if len(self._known) > MAX_REMEMBERED_GRAMMARS:
            key = next((key for key, task in self._known.items() if task.done), None)
            if key is not None:
                del self._known[key]

    def close(self, wait: bool = True) -> None:
        """End the lanes; what still waits for them is refused. Not `wait`: a compilation may go on for a while."""
        for lane in self._lanes:
            lane.close(wait)
        for task in self._known.values():
            if not task.done:
                task.finish("unavailable for new grammars at the moment; send the request again")


def _key(guide: Guide) -> bytes:
    return hashlib.sha256(repr(guide).encode()).digest()


class _GrammarTask(Preparation):
    def __init__(self, guide: Guide, caller: str) -> None:
        super().__init__()
        self.guide = guide
        self.caller = caller
        self.path = caller.split("/", 1)
        self.measured = GrammarMeasurement()
        # answers that were finished with it
        self.finished = 0


class _CompileLane:
    """A thread that starts with its first grammar."""

    def __init__(
        self,
        name: str,
        limits: GrammarLimits,
        new_probe: Callable[[int], GrammarSandbox],
        new_compiler: Callable[[], GrammarCompiler],
        wake: Callable[[], None],
        slower: _CompileLane | None = None,
    ) -> None:
        self._limits = limits
        self._probe = new_probe(limits.niceness)
        self._new_compiler = new_compiler
        self._compiler: GrammarCompiler | None = None
        self._wake = wake
        self._slower = slower
        self.memory = 0
        self._tasks: RoundRobinQueue[_GrammarTask] = RoundRobinQueue()
        self._callers: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, task: _GrammarTask) -> None:
        with self._changed:
            self._tasks.put(task.path, task)
            self._callers[task.caller] += 1
            self._changed.notify()
            if self._thread.ident is None:
                self._thread.start()

    def waiting(self, name: str | None = None) -> int:
        """How many wait here, of `name` or of all."""
        with self._changed:
            return self._tasks.size if name is None else self._tasks.waiting(name)

    def of(self, caller: str) -> int:
        """How many grammars of `caller` wait here or are at work."""
        with self._changed:
            return self._callers[caller]

    def close(self, wait: bool) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()
        self._probe.end()
        if wait and self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._limits.niceness)
        while self._open:
            task = self._next()
            if task is None:
                self._probe.close()
            else:
                self._handle(task)
                with self._changed:
                    self._callers -= Counter([task.caller])

    def _handle(self, task: _GrammarTask) -> None:
        if task.drop_if_unwanted():
            return
        if self._slower is not None and self._slower.of(task.caller) >= _MAX_SLOW_PER_CALLER:
            self._slower.put(task)
        else:
            self._settle(task)

    def _next(self) -> _GrammarTask | None:
        """None after a long time without work, and when the lane ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks.size or not self._open, _IDLE_SECONDS)
            return self._tasks.take() if self._tasks.size and self._open else None

    def _settle(self, task: _GrammarTask) -> None:
        try:
            refusal = self._make_ready(task)
        except GrammarLimitError as error:
            if error.slow and self._slower is not None:
                self._slower.put(task)
                return
            refusal = str(error)
        except Exception as error:  # noqa: BLE001 - whatever happens, the requests that wait must hear of it
            refusal = f"the grammar could not be compiled: {error}"
            task.dropped = True  # it may work the next time
        task.finish(f"{GUIDE}: {refusal}" if refusal else "")
        self._wake()

    def _make_ready(self, task: _GrammarTask) -> str | None:
        guide, measured = task.guide, self._measured(task.guide)
        task.measured = measured
        refusal = measured.problem or _too_costly(measured, self._limits)
        if refusal:
            return refusal
        if self._compiler is None:
            self._compiler = self._new_compiler()
        self.memory += measured.memory
        return self._compiler.compile(guide)

    def _measured(self, guide: Guide) -> GrammarMeasurement:
        """A refusal is remembered, and a host that gives the processor to others lengthens CPU times too: a time
        somewhat over its limit must be seen again."""
        measured = self._probe.measure(guide, self._limits)
        for _ in range(_MAX_REMEASUREMENTS):
            if measured.problem or not (measured.grows or 1 < _share(measured, self._limits) < _REMEASURE_BELOW):
                break
            again = self._probe.measure(guide, self._limits)
            measured = replace(
                measured,
                join_seconds=min(measured.join_seconds, again.join_seconds),
                token_seconds=min(measured.token_seconds, again.token_seconds),
                mean_seconds=min(measured.mean_seconds, again.mean_seconds),
                grows=measured.grows and again.grows,
            )
        return measured


def _share(measured: GrammarMeasurement, limits: GrammarLimits) -> float:
    """Of what it may take in time, at the worse of both limits."""
    return max(measured.join_seconds / limits.join_seconds, measured.token_seconds / limits.token_seconds)


def _too_costly(measured: GrammarMeasurement, limits: GrammarLimits) -> str | None:
    if measured.join_seconds > limits.join_seconds:
        return f"the grammar is too large: it takes {measured.join_seconds:.2f} s to start, once compiled"
    if measured.token_seconds > limits.token_seconds:
        return f"the grammar takes {measured.token_seconds * 1000:.0f} ms per token to follow"
    if measured.grows:
        return "the grammar takes longer to follow with each token of the answer"
    if measured.memory > limits.memory:
        return f"the grammar takes more than {limits.memory >> 20} MiB of memory"
    return None
