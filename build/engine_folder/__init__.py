"""The engine folder: its manifest, atomic publication, build lock and resumable stages.

The work of each stage belongs to `job/` and `targets/`.
"""
