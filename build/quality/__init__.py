"""Quality of quantised models: measures against the source, gates and golden prompts.

Quantising itself belongs to `quantize/`.
"""
