"""Hostile and mutated requests against a gateway; LLMOPS_FUZZ_COUNT=20000 makes tests/gateway/test_fuzz.py send more.

A family of requests is a module of `families/` with a function `cases(target, chance)`. New modules are discovered.
"""

from tests.faults.fuzz.base import Case, Family, Target
from tests.faults.fuzz.families import FAMILIES
from tests.faults.fuzz.runner import Findings, fuzz, some

__all__ = ["FAMILIES", "Case", "Family", "Findings", "Target", "fuzz", "some"]
