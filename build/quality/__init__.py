"""How far a quantised model is from its source: metrics, gates, golden prompts.

Quantising itself belongs to `quantize/`.
"""
