"""Faults on command: a JSON file says what is wrong with this engine at the moment."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POLL = 0.01


@dataclass(frozen=True)
class Faults:
    """`slow`: steps take so many times as long. `hang`: the engine's thread stands still, `stall`: only its tokens do.
    `die`: the engine ends, `refuse`: it takes no requests. `lie`: what its EngineStats
    say instead of the truth. `drop_kv`: its cache is emptied once for every other number. `scramble`: the models of
    this repository that say other tokens, as with wrong weights.
    """

    slow: float = 1.0
    hang: bool = False
    stall: bool = False
    die: bool = False
    refuse: bool = False
    lie: Mapping[str, Any] = field(default_factory=dict)
    drop_kv: int = 0
    scramble: Sequence[str] = ()


class FaultFile:
    """Reads `path` again when it was replaced; none, or an empty path: nothing is wrong."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = (0, 0)
        self._faults = Faults()

    def now(self) -> Faults:
        """Return the present faults. While the engine is to hang, this does not return."""
        while self._read().hang:
            time.sleep(_POLL)
        return self._faults

    def _read(self) -> Faults:
        if not self._path:
            return self._faults
        try:
            found = os.stat(self._path)
            seen = (found.st_ino, found.st_mtime_ns)
            if seen != self._seen:
                self._seen, self._faults = seen, Faults(**json.loads(Path(self._path).read_text()))
        except FileNotFoundError:
            self._seen, self._faults = (0, 0), Faults()
        return self._faults


def command_faults(path: Path, **faults: Any) -> None:
    """Give the engine with this `path` these faults from now on (see Faults).

    Without any, it has none.
    """
    known = Faults(**faults)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps({name: getattr(known, name) for name in faults}))
    part.replace(path)
