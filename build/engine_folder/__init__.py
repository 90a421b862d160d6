"""The folder that a build writes: its manifest, whole or not at all, one builder at a time, stage by stage.

What a stage does belongs to `job/` and `targets/`.
"""
