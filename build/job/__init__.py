"""One build of an engine folder: start, resume, dry run and upgrade.

The work of each target belongs to `targets/` and `encoder/`.
"""
