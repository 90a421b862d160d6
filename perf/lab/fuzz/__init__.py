"""Hostile and mutated requests against a running gateway: python -m llmops.perf.lab.fuzz URL --model NAME.

A family of requests is one module of `families/` with a function `cases(target, chance)`; new modules are discovered.
"""

from llmops.perf.lab.fuzz.base import Case, Family, Target
from llmops.perf.lab.fuzz.families import FAMILIES
from llmops.perf.lab.fuzz.runner import Findings, fuzz, some

__all__ = ["FAMILIES", "Case", "Family", "Findings", "Target", "fuzz", "some"]
