"""Checkpoint -> engine: read the checkpoint, plan, quantise, build, write engine.json.

Putting engines before Triton and serving them belongs to `model_repository/`.
"""
