"""`llmops verify`: checks that a deployment behaves like its contract, checkpoint and plan.

`findings.py` defines the results of checks. Each part (`contract/`, `answers.py`, `capacity.py`,
`speed.py`, `api_checks.py`) is a list of small checks, and `run.py` runs the parts one after
another.
"""
