"""How a model is laid out over GPUs, and how much of their memory its weights, cache and buffers take.

How long anything takes belongs to `timing/` and `speed/`.
"""
