"""The engine folder: manifest, atomic publication, build lock and resumable stages.

The code that runs in each stage belongs to `job/` and `targets/`.
"""
