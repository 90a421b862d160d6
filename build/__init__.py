"""Build engine folders: read the checkpoint, plan, quantise, build, write engine.json.

Serving engines with Triton belongs to `model_repository/`.
"""
