"""Requests to an engine runtime, as the engine model makes them."""

import numpy as np
from llmops_engine.request import RuntimeRequest


def ask(prompt, count, **fields):
    return RuntimeRequest(np.array(prompt, dtype=np.int64), count, **fields)
