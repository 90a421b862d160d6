"""Run one build of an engine folder: start, resume, dry run and upgrade.

The code of each target belongs to `targets/` and `encoder/`.
"""
