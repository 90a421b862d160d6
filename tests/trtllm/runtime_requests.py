"""Requests to an engine runtime, as the engine model makes them."""

import time

import numpy as np
from llmops_engine.request import RuntimeRequest


def ask(prompt, count, **fields):
    return RuntimeRequest(np.array(prompt, dtype=np.int64), count, **fields)


def collect(runtime, seconds=90.0):
    """{key: [tokens, log-probs, finish, error, cached]} of everything that runs, or ran for so long."""
    found: dict[int, list] = {}
    deadline = time.monotonic() + seconds
    while runtime.has_work() and time.monotonic() < deadline:
        for output in runtime.step():
            one = found.setdefault(output.key, [[], [], "", "", output.cached])
            one[0] += output.token_ids
            one[1] += output.log_probs
            one[2], one[3] = output.finish, output.error
    return found
