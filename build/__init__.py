"""Build engine folders: read a checkpoint, plan, quantise, build and write engine.json.

Serving engines with Triton belongs to `model_repository/`.
"""
