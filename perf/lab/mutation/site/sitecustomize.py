"""Imported by each Python that tests with a fault start: the fault holds there as well."""

from llmops.perf.lab.mutation.changed import inherit

inherit()
