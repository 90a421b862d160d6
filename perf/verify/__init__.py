"""`llmops verify`: check that a deployment keeps the promises of its contract, checkpoint and plan.

`findings.py` defines findings. Each part (`contract/`, `answers.py`, `capacity.py`, `speed.py`,
`api_checks.py`) is a list of small checks, and `run.py` runs them one after the other.
"""
