"""Checkpoint -> engine: read the checkpoint, plan, quantise, build, write engine.json."""
