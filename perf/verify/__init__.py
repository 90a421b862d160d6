"""`llmops verify`: does a deployment do what its contract, its checkpoint and its plan promised.

`base.py` says what a finding is; each part (`contract/`, `answers.py`, `capacity.py`, `speed.py`, `surface.py`) is a
list of small checks; `run.py` carries them out one after the other.
"""
